#!/usr/bin/env bash
# Runs the GPU tests and measurements on a machine with a GPU and without a network.
#
#   OUT=DIR tests/gpu/run.sh [PART ...]        parts: env contract tests bench (default: all)
#
# Wheels carried in .whl/ are installed into a directory of their own; the extension is the one
# carried as .gpu/_lib.abi3.so (liburing linked statically) or is built here. Both are made by
# scripts/carry_gpu.sh. Every part has a time limit of its own (seconds, CONTRACT_S TESTS_S BENCH_S)
# and writes its results as it goes: env.json, tests.log, record.jsonl, bench.json, bench.log.
set -u -o pipefail
cd "$(dirname "$0")/../.."
out=${OUT:-$PWD/.gpu/out}
python=${PYTHON:-python3}
site=${SITE:-/tmp/kvstore-site}
parts=${*:-env contract bench tests}
mkdir -p "$out" "$site"
export PYTHONUNBUFFERED=1 PYTHONDONTWRITEBYTECODE=1
began=$(date +%s)

if compgen -G '.whl/*.whl' >/dev/null; then
    "$python" -m pip install -q --no-index --no-deps --no-compile --no-cache-dir --upgrade \
        --target "$site" .whl/*.whl || echo "run.sh: the carried wheels could not be installed"
fi
ln -sfn "$PWD/bench" "$site/kvstore_bench"
export PYTHONPATH=$PWD:$site${PYTHONPATH:+:$PYTHONPATH}

works() { "$python" -c 'import kvstore._uring._ffi, kvstore.devices.cuda' 2>"$out/import.log"; }
[ -f .gpu/_lib.abi3.so ] && cp .gpu/_lib.abi3.so kvstore/_uring/_lib.abi3.so
if ! works; then
    echo "run.sh: building the extension here"
    "$python" build_uring.py && works || { cat "$out/import.log"; exit 2; }
fi

failed=0
run() { # name, seconds, command...
    local name=$1 limit=$2 status
    shift 2
    echo "== $name (at $(($(date +%s) - began)) s, limit $limit s)"
    timeout -k 10 "$limit" "$@"
    status=$?
    echo "== $name: exit $status after $(($(date +%s) - began)) s in all"
    [ "$status" = 0 ] || failed=1
}

for part in $parts; do
    case $part in
    env) run env 60 "$python" tests/gpu/environment.py "$out/env.json" ;;
    contract)
        run contract "${CONTRACT_S:-60}" bash -c "set -o pipefail; $python -m pytest tests/unit/device -m gpu -q -rs \
            -o filterwarnings=default -p no:cacheprovider --timeout 40 2>&1 | tee '$out/contract.log'"
        ;;
    tests)
        export KVSTORE_GPU_RECORD=$out/record.jsonl KVSTORE_GPU_SCALE=${SCALE:-20}
        run tests "${TESTS_S:-270}" bash -c "set -o pipefail; $python -m pytest tests/gpu -v -rs --durations 8 \
            -o filterwarnings=default -p no:cacheprovider --timeout 90 ${PYTEST_ARGS:-} 2>&1 \
            | tee '$out/tests.log'"
        ;;
    bench)
        limit=${BENCH_S:-190}
        run bench "$limit" bash -c "set -o pipefail; $python -m kvstore_bench device --output '$out/bench.json' \
            --time-limit $((limit - 45)) --directory '${BENCH_DIR:-/tmp}' ${BENCH_ARGS:-} 2>&1 \
            | tee '$out/bench.log'"
        ;;
    *) echo "run.sh: unknown part $part" && exit 2 ;;
    esac
done
exit $failed
