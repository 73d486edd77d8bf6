PYTHON ?= python3
VENV := .venv
RUN := $(VENV)/bin/python
WORKERS ?= 2
EXTRAS ?= experiments,test
ARGS ?=

.PHONY: train test lint types bench bench-kernels compile-kernels hosts newest clean

# The main job: digits under six exchanges. ARGS="--config=configs/..." picks
# another.
train: $(VENV)/installed
	$(RUN) -m experiments.train --json=results/train.jsonl \
	  --plot=results/train.png $(ARGS)

# Everything: lint, types, doctests, tests.
test: lint types
	$(RUN) -m pytest -n $(WORKERS) $(ARGS)

lint: $(VENV)/installed
	$(RUN) -m ruff format --check .
	$(RUN) -m ruff check .

types: $(VENV)/installed
	$(RUN) -m mypy

bench: $(VENV)/installed
	$(RUN) -m experiments.codecs $(ARGS)

# Every op of jaxmotion.kernels on this device: correct, and how fast.
bench-kernels: $(VENV)/installed
	$(RUN) -m experiments.kernels $(ARGS)

# What XLA makes of them for an H100, on a machine without a GPU. The wheels are
# in the extra `cuda-compile`; JAX then says at every start that it has no GPU,
# so they may have an environment of their own: make compile-kernels
# VENV=.venv-cuda EXTRAS=experiments,test,cuda-compile
compile-kernels: $(VENV)/installed
	$(RUN) -m experiments.kernels --compiled $(ARGS)

# Two hosts and a slow link: make hosts ARGS="--rate=1gbit". The peers need the
# extra `peers`.
hosts: $(VENV)/installed
	$(RUN) -m experiments.hosts $(ARGS)

# The tests of the library itself on another interpreter, with the newest JAX:
# make newest PYTHON=python3.12
newest:
	$(PYTHON) -m venv .venv-newest
	.venv-newest/bin/python -m pip install --quiet --upgrade pip
	.venv-newest/bin/python -m pip install --quiet --upgrade \
	  --upgrade-strategy eager -e '.[test]'
	.venv-newest/bin/python -c "import jax; print('JAX', jax.__version__)"
	.venv-newest/bin/python -m pytest -n $(WORKERS) --ignore=tests/experiments \
	  tests jaxmotion

$(VENV)/installed: pyproject.toml
	$(PYTHON) -m venv $(VENV)
	$(RUN) -m pip install --quiet --upgrade pip
	$(RUN) -m pip install --quiet -e '.[$(EXTRAS)]'
	touch $@

clean:
	rm -rf $(VENV) .venv-newest results
