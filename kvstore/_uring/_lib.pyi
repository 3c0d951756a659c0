from typing import Any

class _Lib:
    def __getattr__(self, name: str) -> Any: ...

ffi: Any
lib: _Lib
