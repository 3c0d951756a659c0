# make demo: the replay benchmark's table.   make test: all checks.   Both set everything up first.
#
# PYTHON is the interpreter that makes the .venv; CC compiles the extension.
# TORCH is what `make torch` installs for the tests that read device pools as tensors; kvstore
# itself and its other tests need no torch, and `make setup` never installs it.
# KVSTORE_PURE_PYTHON=1 leaves the core uncompiled, and runs its Python source (docs/adr/0015).

PYTHON ?= python3
CC ?= cc
TORCH ?= torch==2.13.0
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check -qq
EXTRAS := bench,test,lint

# The build's own requirements, as pyproject.toml names them; in the .venv, so that a rebuild
# needs no network.
BUILD_REQUIRES := 'setuptools>=77' 'cffi>=2.1' 'mypy>=2.4'
C_SOURCES := $(filter-out kvstore/_uring/_lib.c,$(wildcard kvstore/_uring/*.c kvstore/_uring/*.h))

C_FORMATTED = $(filter-out %.cdef.h %.ptx.h,$(C_SOURCES))

TESTS ?= tests
PYTEST_ARGS ?=
BENCH_DIR ?= build/bench

#: The tests that run a second time on the Python source, if the core is compiled.
CORE_TESTS := tests/unit/core tests/property

export CC
MAKEFLAGS += --no-print-directory
.DEFAULT_GOAL := help
.DELETE_ON_ERROR:

.PHONY: help
help:
	@echo "make demo      replay a workload through all engine and copy options, print the table"
	@echo "make test      lint, types, import contracts and all tests"
	@echo "make setup     only the set-up: system packages, .venv, the compiled extension and core"
	@echo "make lint      ruff, clang-format, mypy, import-linter; make format applies the formats"
	@echo "make bench     measure bookkeeping and raw I/O on this machine (about 5 minutes)"
	@echo "make sanitize  the ring tests with the address and undefined-behaviour sanitizers"
	@echo "make stress    random transfers, cancels, faults, shutdowns under them, then a leak check"
	@echo "make coverage  the tests with branch coverage"
	@echo "make torch     install $(TORCH) into the .venv, for the tests that use it"
	@echo "make clean     remove what was built; make distclean: the .venv too"

# ---------------------------------------------------------------------------------------- set-up

.PHONY: setup
setup: $(VENV)/.built
	@$(if $(filter setup,$(MAKECMDGOALS)),echo "setup: $(VENV) is ready",:)

$(VENV)/.system: scripts/system-packages
	@CFLAGS="$(CFLAGS)" scripts/system-packages "$(PYTHON)"
	@test -x $(BIN)/python && $(BIN)/python -c 'import pip' 2>/dev/null || { \
	  echo "setup: making $(VENV) with $$($(PYTHON) --version)"; \
	  $(PYTHON) -m venv --clear $(VENV); }
	@touch $@

$(VENV)/.packages: $(VENV)/.system pyproject.toml
	@echo "setup: installing Python packages"
	@$(PIP) install $(BUILD_REQUIRES)
	@$(BIN)/python scripts/requirements.py $(EXTRAS) > $(VENV)/requirements.txt
	@$(PIP) install -r $(VENV)/requirements.txt
	@touch $@

# Without the headers a rebuild could only fail: ask again before each one, in milliseconds.
# What the core is compiled from is compared by content: `.core` changes with it, or with the
# variable that switches compiling off.
$(VENV)/.core: $(VENV)/.system always
	@$(BIN)/python kvstore/compiled.py > $@.new
	@cmp -s $@.new $@ && rm $@.new || mv $@.new $@

.PHONY: always
always:

$(VENV)/.built: $(VENV)/.packages $(VENV)/.core build_uring.py setup.py $(C_SOURCES)
	@CFLAGS="$(CFLAGS)" scripts/system-packages "$(PYTHON)"
	@echo "setup: building kvstore"
	@rm -rf build/temp.* build/lib.* build/bdist.*
	@$(PIP) install --no-build-isolation --no-deps --editable .
	@touch $@

.PHONY: torch
torch: setup
	@$(BIN)/python -c 'import torch' 2>/dev/null || test -z "$(TORCH)" || $(PIP) install "$(TORCH)"

# --------------------------------------------------------------------------------------- results

.PHONY: demo
demo: setup
	@$(BIN)/kvstore-bench replay --ablation $(DEMO_ARGS)

.PHONY: bench
bench: setup
	@mkdir -p $(BENCH_DIR)
	@$(BIN)/kvstore-bench meta --pages 100000 --repeats 3
	@$(BIN)/kvstore-bench compare --directory $(BENCH_DIR) --bs 64k,1m --repeats 3 $(BENCH_ARGS)

# ---------------------------------------------------------------------------------------- checks

.PHONY: format
format: setup
	@$(BIN)/ruff check --quiet --fix . || true
	@$(BIN)/ruff format --quiet .
	@$(BIN)/clang-format -i $(C_FORMATTED)

.PHONY: lint
lint: setup
	@$(BIN)/validate-pyproject pyproject.toml > /dev/null
	@$(BIN)/ruff check --quiet .
	@$(BIN)/ruff format --quiet --check .
	@$(BIN)/clang-format --dry-run -Werror $(C_FORMATTED)
	@$(BIN)/mypy --no-error-summary
	@$(BIN)/lint-imports --no-cache > build/imports.log 2>&1 || { cat build/imports.log; exit 1; }
	@echo "lint: formats, types and import contracts are clean"

build:
	@mkdir -p build
lint: | build

.PHONY: test
test: lint
	@$(if $(filter tests,$(TESTS)),$(MAKE) test-source,:)
	@$(BIN)/python -m pytest $(PYTEST_ARGS) $(TESTS)

# The reference and the fallback: the core's own tests on its Python source.
.PHONY: test-source
test-source: setup
	@grep -q pure $(VENV)/.core || KVSTORE_PURE_PYTHON=1 $(BIN)/python -m pytest $(PYTEST_ARGS) $(CORE_TESTS)

.PHONY: coverage
coverage: setup
	@KVSTORE_PURE_PYTHON=1 $(BIN)/coverage run -m pytest $(PYTEST_ARGS) $(TESTS)
	@$(BIN)/coverage report

# The extension is built a second time, aside, with the sanitizers; the preloaded run-time
# belongs to the compiler. The tests do not ask for leaks, because the interpreter keeps memory
# until it exits; `make stress` does, and tells what is ours from what is not.
ASAN_LIBRARY = $(shell $(CC) -print-file-name=libasan.so) $(shell $(CC) -print-file-name=libubsan.so)

SANITIZE_TESTS ?= $(wildcard tests/uring tests/unit/uring tests/unit/device tests/unit/test_uring_*.py)

STRESS_ARGS ?= --transfers 100000 --seed 1
SANITIZED = cd build/sanitize && LD_PRELOAD="$(ASAN_LIBRARY)" PYTHONPATH=. PYTHONMALLOC=malloc

.PHONY: sanitized sanitize stress
sanitized: setup
	@rm -rf build/sanitize && mkdir -p build/sanitize
	@cp -R kvstore build_uring.py pyproject.toml README.md LICENSE tests build/sanitize/ && cp -R bench build/sanitize/kvstore_bench
	@rm -f build/sanitize/kvstore/_uring/*.so build/sanitize/kvstore/_uring/*.o
	@cd build/sanitize && KVSTORE_SANITIZE=1 ../../$(BIN)/python build_uring.py

sanitize: sanitized
	@$(SANITIZED) ASAN_OPTIONS=detect_leaks=0:abort_on_error=0 \
	  ../../$(BIN)/python -m pytest $(PYTEST_ARGS) $(SANITIZE_TESTS)

stress: sanitized
	@$(SANITIZED) ASAN_OPTIONS=detect_leaks=1:leak_check_at_exit=0:abort_on_error=0 \
	  ../../$(BIN)/python tests/uring/stress.py $(STRESS_ARGS)

# -------------------------------------------------------------------------------------- clean-up

.PHONY: clean distclean
clean:
	@rm -rf build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .import_linter_cache \
	  .hypothesis .coverage htmlcov kvstore/_uring/_lib.c kvstore/_uring/_lib*.so kvstore/_uring/*.o \
	  kvstore/core/*.so kvstore/core/*/*.so
	@rm -f $(VENV)/.built
	@find kvstore bench tests -name __pycache__ -type d -prune -exec rm -rf {} +

distclean: clean
	@rm -rf $(VENV)
