import cffi

class _Lib:
    def __getattr__(self, name: str) -> object: ...

ffi: cffi.FFI
lib: _Lib
