#!/usr/bin/env bash
# Prepares what tests/gpu/run.sh needs on a GPU machine without a network and without liburing-dev:
# wheels for its Python in .whl/ and the extension with liburing linked statically in .gpu/.
#
#   scripts/carry_gpu.sh [PYTHON]              PYTHON has pip and cffi; default: python3
set -eu
cd "$(dirname "$0")/.."
python=${1:-python3}
mkdir -p .whl .gpu
rm -f .whl/*.whl
platforms=""
for name in manylinux_2_28 manylinux_2_27 manylinux_2_26 manylinux_2_17 manylinux2014 manylinux1; do
    platforms="$platforms --platform ${name}_x86_64"
done
"$python" -m pip download -q --no-deps --only-binary=:all: --python-version "${TARGET_PYTHON:-3.12}" \
    --implementation cp $platforms -d .whl cffi pycparser pytest pytest-asyncio pytest-timeout \
    pluggy iniconfig packaging pygments
build=$(mktemp -d)
trap 'rm -rf "$build"' EXIT
mkdir -p "$build/kvstore/_uring"
cp build_uring.py "$build/"
cp kvstore/_uring/*.c kvstore/_uring/*.h "$build/kvstore/_uring/"
rm -f "$build/kvstore/_uring/_lib.c"
(cd "$build" && KVSTORE_STATIC_LIBURING=1 "$python" build_uring.py)
cp "$build"/kvstore/_uring/_lib.abi3.so .gpu/_lib.abi3.so
ls -l .whl .gpu
