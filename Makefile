# `make help` lists the targets. Needs python3 with venv and a C++17 compiler; the rest is installed
# into .venv (CMake and ninja too).
#
# Where there is no NVIDIA GPU, `make setup` pins PyTorch to the release in constraints.txt, which CI
# uses in its CPU build. Where nvidia-smi is found it pins everything but PyTorch, so that the CUDA
# build that is newest, or the one already there, is used, and Triton, whose release that build says.
# For a PyTorch of your own (ROCm, say):
#     make setup TORCH=keep VENV_FLAGS=--system-site-packages

SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help
.DELETE_ON_ERROR:

PYTHON ?= python3
VENV ?= .venv
VENV_FLAGS ?=
EXTRAS ?= dev
TORCH ?= $(if $(shell command -v nvidia-smi),keep,pin)
PYTEST_FLAGS ?= --durations=10 --timeout=300
PERF_FLAGS ?=
DEMO_FLAGS ?=
export CMAKE_BUILD_PARALLEL_LEVEL ?= $(shell nproc)

PY := $(VENV)/bin/python
PIP := $(PY) -m pip --disable-pip-version-check
BUILD_REQUIRES := scikit-build-core nanobind cmake ninja
# Stamps lie in the venv, and go when it goes.
CONSTRAINTS := $(VENV)/constraints.txt
TOOLS := $(VENV)/.tools
INSTALLED := $(VENV)/.installed
COMPILE_CHECKS := $(VENV)/.compile-checks
# The oldest Triton that fastkern takes (fastkern/device/triton_library.py), in a venv of its own.
OLDEST_TRITON := triton==3.6.0 'numpy<2.4'
OLDEST_VENV := $(VENV)-triton-oldest
OLDEST_INSTALLED := $(OLDEST_VENV)/.installed
SOURCE_LIST := $(VENV)/.sources

NATIVE := $(sort $(shell find planner kernels -name '*.cc' -o -name '*.h'))
C_FILES = $(sort $(shell find planner kernels tests perf -name '*.cc' -o -name '*.h' -o -name '*.cu' -o -name '*.hip'))

.PHONY: help setup demo test test-gpu sanitize lint types check-kernels check-triton-oldest format perf wheel clean FORCE

help: ## list the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  %-19s %s\n", $$1, $$2 }' $(firstword $(MAKEFILE_LIST))

setup: $(INSTALLED) ## make .venv, build the extensions, install fastkern in place (again: only what changed)

$(CONSTRAINTS): constraints.txt Makefile
	test -x $(PY) || $(PYTHON) -m venv $(VENV_FLAGS) $(VENV)
	grep -v $(if $(filter pin,$(TORCH)),'^#','^#\|^torch==') constraints.txt > $@

# PyTorch first: a CUDA build wants a release of Triton of its own, whatever is pinned here.
$(TOOLS): $(CONSTRAINTS)
	grep -v '^triton==' $(CONSTRAINTS) > $(CONSTRAINTS).torch
	$(PIP) install -qq -c $(CONSTRAINTS).torch $(BUILD_REQUIRES) torch
	@$(PY) -c 'import importlib.metadata as m; exit(any(r.startswith("triton") for r in m.requires("torch") or ()))' \
	  || cp $(CONSTRAINTS).torch $(CONSTRAINTS)
	touch $@

# Changes when a source file comes or goes; the prerequisites below only see those that change.
$(SOURCE_LIST): FORCE | $(CONSTRAINTS)
	@echo $(NATIVE) | cmp -s - $@ || echo $(NATIVE) > $@

$(INSTALLED): $(TOOLS) $(SOURCE_LIST) $(NATIVE) CMakeLists.txt pyproject.toml
	$(PIP) install -qq -c $(CONSTRAINTS) --no-build-isolation -e .$(if $(EXTRAS),[$(EXTRAS)])
	touch $@

$(COMPILE_CHECKS): $(INSTALLED)
	$(PIP) install -qq -c $(CONSTRAINTS) --no-build-isolation -e .[compile-checks]
	touch $@

demo: $(INSTALLED) ## run the demonstration
	$(VENV)/bin/fastkern demo $(DEMO_FLAGS)

test: $(INSTALLED) ## run the tests that need no device
	$(PY) -m pytest tests --ignore tests/device_compile --ignore tests/triton_compile --ignore tests/gpu $(PYTEST_FLAGS)

# Offline, and past the pins of `make setup`: with the packages that PYTHON has. pytest starts outside
# of the repository, where the folder fastkern/ would hide what was built.
test-gpu: ## build for PYTHON and run the tests that need a GPU with it
	PYTHON=$(PYTHON) perf/gpu_check.sh --build-only --scratch build/gpu
	python=$$(realpath -s "$$(command -v $(PYTHON))") && cd build/gpu/run && \
	FASTKERN_CACHE_DIR=$(CURDIR)/build/gpu/kernels \
	PYTHONPATH=$(CURDIR)/build/gpu/site:$(CURDIR)$${PYTHONPATH:+:$$PYTHONPATH} \
	"$$python" -m pytest -c $(CURDIR)/tests/gpu/pytest.ini --rootdir $(CURDIR) $(CURDIR)/tests/gpu

sanitize: $(INSTALLED) ## build and run planner and host kernels under the sanitizers
	PYTHON=$(PY) bash tests/sanitize/run.sh

lint: $(INSTALLED) ## check style: ruff, clang-format
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .
	$(VENV)/bin/clang-format --dry-run -Werror $(C_FILES)
	@awk 'length > 100 { printf "%s:%d: longer than 100 columns\n", FILENAME, FNR; bad = 1 } END { exit bad }' $(C_FILES)

# The package as it installs, made of links: planner/ and kernels/ inside fastkern/, with the stubs
# that the build made of the extension modules. Messages are cut back to the repository's paths.
types: $(INSTALLED) ## check types: mypy, strict
	@rm -rf build/types
	@mkdir -p build/types/fastkern/planner build/types/fastkern/kernels
	@ln -s $(CURDIR)/fastkern/* build/types/fastkern/
	@ln -s $(CURDIR)/planner/* build/types/fastkern/planner/
	@ln -s $(CURDIR)/kernels/* build/types/fastkern/kernels/
	@cp $(VENV)/lib/python*/site-packages/fastkern/planner/_core.pyi build/types/fastkern/planner/
	@cp $(VENV)/lib/python*/site-packages/fastkern/kernels/_host.pyi build/types/fastkern/kernels/
	$(PY) -m mypy | sed -e 's,^build/types/fastkern/\(planner\|kernels\)/,\1/,' -e 's,^build/types/,,'

check-kernels: $(COMPILE_CHECKS) ## compile the kernels for CUDA and HIP devices, without a GPU
	$(PY) -m pytest tests/device_compile tests/triton_compile $(PYTEST_FLAGS)

# All else it sees in the other venv, behind its own packages.
$(OLDEST_INSTALLED): $(COMPILE_CHECKS)
	test -x $(OLDEST_VENV)/bin/python || $(PYTHON) -m venv $(OLDEST_VENV)
	$(PY) -c 'import sysconfig; print("import site; site.addsitedir(%r)" % sysconfig.get_path("purelib"))' \
	    > "$$($(OLDEST_VENV)/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/main.pth"
	$(OLDEST_VENV)/bin/python -m pip --disable-pip-version-check install -qq --ignore-installed $(OLDEST_TRITON)
	touch $@

check-triton-oldest: $(OLDEST_INSTALLED) ## compile the kernels in Triton with the oldest release of it
	$(OLDEST_VENV)/bin/python -m pytest tests/triton_compile $(PYTEST_FLAGS)

format: $(INSTALLED) ## rewrite sources in the project's style
	$(VENV)/bin/ruff check --fix --exit-zero .
	$(VENV)/bin/ruff format .
	$(VENV)/bin/clang-format -i $(C_FILES)

perf: $(INSTALLED) ## measure planner and kernels
	$(PY) -m perf $(PERF_FLAGS)

wheel: $(INSTALLED) ## build an sdist and, from it, a wheel into dist/
	rm -rf dist
	$(PY) -m build --no-isolation --outdir dist --config-setting=cmake.define.FASTKERN_PREBUILD_GIN=AUTO .

clean: ## remove build output and caches (.venv stays)
	rm -rf build dist .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find . -name __pycache__ -not -path './$(VENV)/*' -prune -exec rm -rf {} +
