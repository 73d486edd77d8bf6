PYTHON ?= python3
VENV := .venv
RUN := $(VENV)/bin/python
WORKERS ?= 2
EXTRAS ?= experiments,test
ARGS ?=
# Tests of a file share what it has compiled, so that they stay in one process.
# Files stay in order, so that those that compile alike follow each other.
TOGETHER := --dist=loadfile --no-loadscope-reorder
# A test that waits forever ends its process, which prints where each thread is.
# No process takes the place of one that ended: with `loadfile`, pytest-xdist 3.8
# would then wait forever (pytest-dev/pytest-xdist issue 1378).
LIMIT := --timeout=300 --timeout-method=thread --max-worker-restart=0

# Tests start many processes of Python. If compiled modules were not kept, each would
# take 4.0 s of CPU time to import jaxmotion, JAX and optax instead of 1.3.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: train test pytest test-slow lint types codecs kernels compile-kernels hosts \
  docs site-check release-check newest clean

# Train digits under six exchanges; print a table, write rows and a plot to
# results/. ARGS="--config=configs/bytes_lm.py" chooses another configuration.
train: $(VENV)/installed
	$(RUN) -m experiments.train --json=results/train.jsonl \
	  --plot=results/train.png $(ARGS)

# Run all checks but the slow tests: lint, then types beside doctests and tests.
test: lint
	$(MAKE) --jobs=2 types pytest

# Run doctests and tests, but for those that bear the mark `slow`.
pytest: $(VENV)/installed
	$(RUN) -m pytest -n $(WORKERS) $(TOGETHER) $(LIMIT) -m 'not slow' $(ARGS)

# Run the slow tests: jobs that are killed, limited links, long training.
test-slow: $(VENV)/installed
	$(RUN) -m pytest -n $(WORKERS) $(TOGETHER) $(LIMIT) -m slow tests $(ARGS)

# Check format and style.
lint: $(VENV)/installed
	$(RUN) -m ruff format --check .
	$(RUN) -m ruff check .

# Check types.
types: $(VENV)/installed
	$(RUN) -m mypy

# Time every codec on this device against a copy.
codecs: $(VENV)/installed
	$(RUN) -m experiments.codecs $(ARGS)

# Check and time every op of jaxmotion.kernels on this device.
kernels: $(VENV)/installed
	$(RUN) -m experiments.kernels $(ARGS)

# Compile every op of jaxmotion.kernels for an H100, on a machine without a GPU.
# The extra `cuda-compile` brings the compiler. With it, JAX warns at every start
# that there is no GPU; give it an environment of its own to avoid that:
# make compile-kernels VENV=.venv-cuda EXTRAS=experiments,test,cuda-compile
compile-kernels: $(VENV)/installed
	$(RUN) -m experiments.kernels --compiled $(ARGS)

# Time training steps on two hosts with a slow link:
# make hosts ARGS="--rate=1gbit". The PyTorch cases need the extra `peers`.
hosts: $(VENV)/installed
	$(RUN) -m experiments.hosts $(ARGS)

# Run the tutorials and build the documentation site in site/. A warning is an
# error, as are links to pages or sections that do not exist. Tutorials that have
# not changed are not run again. Links to other sites:
# make docs ARGS="-b linkcheck". Names of JAX and optax become links if there is a
# network; DOCS_OFFLINE=1 does without.
docs: $(VENV)/docs-installed
	JAX_PLATFORMS=cpu $(RUN) -m sphinx --jobs=$(WORKERS) --fail-on-warning \
	  --keep-going --quiet docs site $(ARGS)

# Render every page of the site in Qt's browser, which the extra `browser` brings.
# If a library of the system is missing, the tests are skipped and name it.
site-check: docs
	$(RUN) -m pip install --quiet --no-compile -e '.[browser]'
	$(RUN) -m pytest -n $(WORKERS) $(LIMIT) tests/site $(ARGS)

# Build the wheel and the source archive in dist/, check what they hold, install
# the wheel in an environment of its own, and train with it.
release-check: $(VENV)/installed
	rm -rf dist build .venv-wheel
	$(RUN) -m pip install --quiet --no-compile build twine
	$(RUN) -m build --outdir dist .
	$(RUN) -m twine check --strict dist/*
	$(PYTHON) -m venv .venv-wheel
	.venv-wheel/bin/python -m pip install --quiet dist/*.whl
	cd dist && ../.venv-wheel/bin/python ../examples/quickstart.py
	.venv-wheel/bin/jaxmotion --help

# Run the library's own tests on another interpreter with the newest JAX:
# make newest PYTHON=python3.12
newest:
	$(PYTHON) -m venv .venv-newest
	.venv-newest/bin/python -m pip install --quiet --upgrade pip
	.venv-newest/bin/python -m pip install --quiet --upgrade \
	  --upgrade-strategy eager -e '.[test]'
	.venv-newest/bin/python -c "import jax; print('JAX', jax.__version__)"
	.venv-newest/bin/python -m pytest -n $(WORKERS) $(TOGETHER) $(LIMIT) \
	  -m 'not slow' --ignore=tests/experiments tests jaxmotion

$(VENV)/installed: pyproject.toml
	@echo 'Install into $(VENV): some minutes, without a word from pip.'
	$(PYTHON) -m venv $(VENV)
	$(RUN) -m pip install --quiet --upgrade pip
	$(RUN) -m pip install --quiet --no-compile -e '.[$(EXTRAS)]'
	touch $@

$(VENV)/docs-installed: $(VENV)/installed
	$(RUN) -m pip install --quiet --no-compile -e '.[docs]'
	touch $@

# Remove the environments and all that the other commands wrote.
clean:
	rm -rf $(VENV) .venv-newest .venv-wheel build dist results site docs/reference \
	  docs/.jupyter_cache jupyter_execute
