"""Name the compiled module: the one setting that pyproject.toml cannot carry."""

from setuptools import setup

setup(
    cffi_modules=["build_uring.py:ffibuilder"],
    options={"bdist_wheel": {"py_limited_api": "cp311"}},
)
