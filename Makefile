# Every target sets up a virtual environment with the pinned packages. It needs only a Python >= 3.12.
VENV ?= .venv
BIN := $(VENV)/bin
DATA ?= data
WORKDIR ?= runs/quickstart
CONSTRAINTS ?= constraints.txt
STAMP := $(VENV)/.installed
TRITON := $(VENV)/.triton
DOCS := $(VENV)/.docs
# The oldest JAX that pyproject.toml allows; constraints.txt pins the newest.
OLDEST_JAX := 0.11.2
# JAX's plugin for CUDA with the assemblers that it needs.
CUDA_COMPILERS := jax-cuda13-plugin jax-cuda13-pjrt nvidia-cuda-nvcc nvidia-nvvm nvidia-nvjitlink

# Huge pages for JAX's buffers make CPU runs a third faster. C libraries without this tunable ignore it.
export GLIBC_TUNABLES ?= glibc.malloc.hugetlb=1

# Checks of a release besides its packages. They get the path of the built wheel in WHEEL.
RELEASE_CHECKS := docs test-notebooks

# Modules of tests/faults, which count to the figures of docs/reliability.md by default.
HOSTILE := $(addprefix faults-,weights inputs workdirs starts workers evaluations)
FAULTS := $(addprefix faults-,bit_flips kills signals lost_process settings disks soak) $(HOSTILE)

.PHONY: quickstart digits check test test-runs test-slow test-all test-full oldest test-oldest test-newest test-gpu faults faults-hostile $(FAULTS) release-check reproduce-tiny docs notebooks test-notebooks lint format clean

quickstart: $(STAMP)  ## Built-in data, training on 4 simulated devices, evaluation, plots: about 5 minutes on 2 cores
	$(BIN)/python -m experiments.prepare_data --dataset=shapes/quickstart --data_dir=$(DATA)
	$(BIN)/python -m experiments.train --config=configs/quickstart.py --workdir=$(WORKDIR) --config.data_dir=$(DATA)
	$(BIN)/python -m experiments.evaluate --workdir=$(WORKDIR)

digits: $(STAMP)  ## Real handwritten digits
	$(BIN)/python -m experiments.train --config=configs/digits.py --workdir=runs/digits

check: lint $(TRITON)  ## Lint, types and the tests of what differs from the main branch
	$(BIN)/python tests/changed.py

# A crashed worker ends the tests: `--dist loadfile` would give its files to a new worker and never end.
# Each file runs in one worker, in the order of tests/conftest.py.
PYTEST := -m pytest -q -n 2 --max-worker-restart 0 --dist loadfile --no-loadscope-reorder

# The marks of pyproject.toml: `test` and `test-runs` share what is neither slow nor full.
QUICK := not slow and not full and not gpu

test: $(TRITON)  ## Losses, kernels, models, data and evaluation on the CPU, and every command once
	$(BIN)/python $(PYTEST) -m "not runs and $(QUICK)"

test-runs: $(TRITON)  ## Training steps, whole runs with stops and faults, processes, plans, verification, examples
	$(BIN)/python $(PYTEST) -m "runs and $(QUICK)"

test-slow: $(TRITON)  ## Quickstart, killed half way, digits, notebooks and processes, in fewer steps than users run
	$(BIN)/python $(PYTEST) -m "slow and not full"

test-all: $(TRITON)  ## These three in one session, which collects tests and compiles shared programs once
	$(BIN)/python $(PYTEST) -m "not full and not gpu"

test-full: $(STAMP)  ## Further cases, and the promised results of quickstart and digits; not in CI
	$(BIN)/python $(PYTEST) -m full

oldest: .venv-oldest.txt  ## The environment of test-oldest
	$(MAKE) VENV=.venv-oldest CONSTRAINTS=$< .venv-oldest/.triton

test-oldest: oldest  ## Lowering, exactness and a training run on the oldest supported JAX
	.venv-oldest/bin/python $(PYTEST) -m "not full and not gpu" -k "lower or matches_oracle or float64 or compile or curve" \
	  tests/ops tests/losses/test_clip.py tests/experiments/test_train.py \
	  tests/losses/test_gradient_order.py::test_random_programs_match_float64

test-newest:  ## The test suite on the newest releases and pre-releases, to see early what the next JAX breaks
	PIP_PRE=1 PIP_UPGRADE=1 $(MAKE) --always-make VENV=.venv-newest CONSTRAINTS=/dev/null .venv-newest/.triton
	PIP_PRE=1 .venv-newest/bin/python -m pip install --quiet --upgrade jax jaxlib  # beyond the bound of pyproject.toml
	.venv-newest/bin/python $(PYTEST)

test-gpu: $(STAMP)  ## Tests that need a GPU
	JAX_PLATFORMS=cuda $(BIN)/python -m pytest -q -m gpu

faults: $(FAULTS)  ## Every count of docs/reliability.md in full, for hours; with `make -k`, also after a failure

faults-hostile: $(HOSTILE)  ## Hostile weights, datasets and work directories; starts, workers and evaluations that fail: about an hour

$(FAULTS): faults-%: $(STAMP)
	$(BIN)/python -m tests.faults.$*

reproduce-tiny: $(STAMP)  ## Tables and figures of the papers on two cores
	$(BIN)/python -m experiments.reproduce --target=all --scale=tiny

notebooks: $(STAMP)  ## Execute the notebooks outside the checkout and store their outputs
	$(BIN)/python tests/notebook_runner.py

test-notebooks: $(STAMP)  ## Execute the notebooks, each in a new environment with the wheel or clone WHEEL
	$(BIN)/python tests/notebook_runner.py --wheel="$(or $(WHEEL),.)"

docs: $(DOCS)  ## The documentation site, in build/site; `.venv/bin/mkdocs serve` shows changes at once
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build

release-check: $(STAMP)  ## Wheel and sdist: metadata, contents, an installation outside the checkout; then RELEASE_CHECKS
	$(BIN)/python -m pip install --quiet --constraint $(CONSTRAINTS) --editable '.[release]'
	rm -rf build dist
	$(BIN)/python -m build
	$(BIN)/python -m twine check --strict dist/*
	$(BIN)/python tests/release.py dist
	@for target in $(RELEASE_CHECKS); do \
	  if ! grep -q "^$$target:" Makefile; then echo "release-check: no target $$target"; continue; fi; \
	  $(MAKE) $$target WHEEL="$$(echo $(CURDIR)/dist/*.whl)" || exit 1; done

lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/python tests/prose.py
	@! git grep -nE '^(<{7}|>{7}) '  # marks of a conflict

format: $(STAMP)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

clean:
	rm -rf $(VENV) .venv-oldest* .venv-newest runs build dist *.egg-info

$(STAMP): pyproject.toml $(CONSTRAINTS)
	@python=$$(for p in python3 python3.13 python3.12 python; do \
	  $$p -c 'import sys; sys.exit(sys.version_info < (3, 12))' 2>/dev/null && { command -v $$p; break; }; done); \
	if [ -z "$$python" ]; then echo "error: found no Python >= 3.12; install one and put it on PATH" >&2; exit 1; fi; \
	echo "using $$python ($$($$python --version))" && $$python -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --constraint $(CONSTRAINTS) --editable '.[dev]'
	@# Tests read the vocabulary of OpenCLIP's tokenizer. Its dependencies, such as PyTorch, are not needed.
	$(BIN)/python -m pip install --quiet --constraint $(CONSTRAINTS) --no-deps open_clip_torch
	touch $@

$(TRITON): $(STAMP)
	$(BIN)/python -m pip install --quiet --constraint $(CONSTRAINTS) --editable '.[triton]'
	@# They compile kernels without a GPU. Inside the environment, JAX would expect all of CUDA.
	$(BIN)/python -m pip install --quiet --constraint $(CONSTRAINTS) --no-deps --upgrade --target $(VENV)/cuda $(CUDA_COMPILERS)
	touch $@

$(DOCS): $(STAMP)
	$(BIN)/python -m pip install --quiet --constraint $(CONSTRAINTS) --editable '.[docs]'
	touch $@

.venv-oldest.txt: constraints.txt Makefile
	sed -E 's/^(jax|jaxlib|jax-cuda13-plugin|jax-cuda13-pjrt)==.*/\1==$(OLDEST_JAX)/' $< > $@
