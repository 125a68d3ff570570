# Every target sets up what it needs on a clean machine: a Python >= 3.12, a virtual environment, the pinned packages.
VENV ?= .venv
BIN := $(VENV)/bin
DATA ?= data
WORKDIR ?= runs/quickstart
STAMP := $(VENV)/.installed
TRITON := $(VENV)/.triton

# Large pages for JAX's buffers: a third more speed on the CPU. Where the C library does not know the setting, no effect.
export GLIBC_TUNABLES ?= glibc.malloc.hugetlb=1

.PHONY: quickstart digits test test-slow test-gpu lint format clean

quickstart: $(STAMP)  ## Built-in data, training on 4 simulated devices, evaluation, pictures: about 5 minutes on 2 cores
	$(BIN)/python -m experiments.prepare_data --dataset=shapes/quickstart --data_dir=$(DATA)
	$(BIN)/python -m experiments.train --config=configs/quickstart.py --workdir=$(WORKDIR) --config.data_dir=$(DATA)
	$(BIN)/python -m experiments.evaluate --workdir=$(WORKDIR)

digits: $(STAMP)  ## Real handwritten digits
	$(BIN)/python -m experiments.train --config=configs/digits.py --workdir=runs/digits

test: $(TRITON)  ## The whole suite on the CPU
	$(BIN)/python -m pytest -q -n 2 --dist loadfile --no-loadscope-reorder tests/experiments tests/ops tests

test-slow: $(STAMP)  ## The quickstart, killed half way, the digits and the notebook, with the results they must reach: about 9 minutes
	$(BIN)/python -m pytest -q -m slow -n 2 --dist worksteal tests/test_quickstart.py tests

test-gpu: $(STAMP)  ## What needs a GPU
	JAX_PLATFORMS=cuda $(BIN)/python -m pytest -q -m gpu

lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: $(STAMP)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

clean:
	rm -rf $(VENV) runs build dist *.egg-info

$(STAMP): pyproject.toml constraints.txt
	@python=$$(for p in python3 python3.13 python3.12 python; do \
	  $$p -c 'import sys; sys.exit(sys.version_info < (3, 12))' 2>/dev/null && { command -v $$p; break; }; done); \
	if [ -z "$$python" ]; then echo "error: found no Python >= 3.12; install one and put it on PATH" >&2; exit 1; fi; \
	echo "using $$python ($$($$python --version))" && $$python -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable '.[dev]'
	touch $@

$(TRITON): $(STAMP)
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable '.[triton]'
	@# Compiles Triton kernels without a GPU; outside the environment, where JAX would miss the rest of CUDA.
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --no-deps --target $(VENV)/cuda jax-cuda13-plugin
	touch $@
