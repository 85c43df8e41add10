# `make demo` and `make test` need git, make and a Python from 3.11 on, and nothing else.
# Another interpreter: make setup PYTHON=python3.14
# The newest versions instead of the tested ones: make test LOCK=requirements-newest.lock

PYTHON ?= python3
LOCK ?= requirements.lock
BIN := .venv/bin
INSTALL := $(BIN)/python -m pip install --quiet --disable-pip-version-check -c $(LOCK)
METADATA := setup.cfg $(LOCK)
# Tests compile much and compute little: most of their time went into what makes programs fast, and
# into cutting them into parts for threads that other tests keep busy. Programs are kept, for the
# other process and for the next run. Flags of XLA that do not exist end the process: these are for
# the version in requirements.lock.
QUICKLY := JAX_DISABLE_MOST_OPTIMIZATIONS=1 SPECJAX_TESTS_CACHE=.jax_cache/tests
ifeq ($(LOCK),requirements.lock)
QUICKLY += XLA_FLAGS="--xla_cpu_use_fusion_emitters=false --xla_cpu_parallel_codegen_split_count=1"
endif

.DEFAULT_GOAL := help
.PHONY: help setup demo real pair quick test slow parity results lint types docs docs-serve \
  release-check lock clean

help:  ## what there is
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "make %-14s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

setup: .venv/setup.stamp  ## .venv with pinned versions

demo: setup  ## both loops side by side on the embedded family; what is gained, and what limits it
	$(BIN)/python -m experiments.race --draft=draft-small --gamma=10
	$(BIN)/python -m experiments.reproduce --config=configs/embedded.py:demo --workdir=runs/embedded
	@echo "Next: a pretrained language model: make real. All tables: make results. Your own pair:"
	@echo "$(BIN)/specjax select --config.target=DIR --config.drafts=DIR,lookup --input=FILE"

real: .venv/real.stamp  ## a chat with a real language model, plain and speculative side by side
	$(BIN)/python -m experiments.chat --workdir=runs/chat

pair: .venv/real.stamp  ## a 1.5B model with its 0.5B draft: 1.6 GB of the hub, or make pair FILES=DIR
	$(BIN)/python -m experiments.chat --config=configs/pair.py --workdir=runs/pair \
	  $(if $(FILES),--config.files='$(FILES)')

results: setup  ## the whole reports, of both embedded families and of the formulas, as in docs/results
	$(BIN)/python -m experiments.reproduce --config=configs/embedded.py:full --workdir=runs/results/parse
	$(BIN)/python -m experiments.reproduce --config=configs/embedded.py:prose --workdir=runs/results/prose
	$(BIN)/python -m experiments.theory --workdir=runs/results/theory

quick: lint types  ## lint, types and the core's tests but for sweeps
	$(QUICKLY) $(BIN)/python -m pytest -q -n 2 --dist loadscope -m "not slow and not sweep" tests/core

test: .venv/test.stamp  ## the tests, but for slow ones and those that need PyTorch
	$(QUICKLY) $(BIN)/python -m pytest -n 2 --dist loadscope -m "not slow and not torch"

slow: .venv/test.stamp  ## whole sweeps and long tests, compiled as users compile
	$(BIN)/python -m pytest -n 2 -m "slow and not torch"

# torch==2.13.0 is a CPU build where pip has been pointed at one (PIP_FIND_LINKS or
# PIP_EXTRA_INDEX_URL); elsewhere on Linux it brings its CUDA libraries along.
parity: .venv/test.stamp  ## the tests against live PyTorch, which is installed for them
	$(INSTALL) torch==2.13.0 sentencepiece==0.2.3 protobuf
	$(QUICKLY) $(BIN)/python -m pytest -n 2 --dist loadscope -m torch \
	  $(shell grep -rl 'mark\.torch' tests --include='test_*.py')

lint: .venv/test.stamp  ## ruff (rules and format), imports, and the prose of docstrings and pages
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/lint-imports --no-cache
	$(BIN)/python tests/lab/test_prose.py

types: .venv/test.stamp  ## mypy
	$(BIN)/mypy

# mkdocs-material prints an advertisement unless the variable is set.
docs docs-serve: export NO_MKDOCS_2_WARNING = 1

# The site has the outputs of notebooks, which git has not.
EXECUTED := $(patsubst %,build/%,$(wildcard notebooks/*.ipynb))

build/notebooks/%.ipynb: notebooks/%.ipynb | .venv/docs.stamp
	@mkdir -p $(@D)
	$(BIN)/jupyter-execute --timeout=900 --output=../$@ $<

docs: .venv/docs.stamp $(EXECUTED)  ## the site with executed notebooks, in site/; a warning is an error
	$(BIN)/mkdocs build --strict

docs-serve: .venv/docs.stamp  ## the site at http://127.0.0.1:8000, built again after each change
	$(BIN)/mkdocs serve

# The wheel is built from the sdist, so a file that the sdist lacks is missed.
RELEASE := build/release

release-check: .venv/test.stamp  ## sdist and wheel; the wheel in a clean environment runs README's example
	rm -rf $(RELEASE)
	mkdir -p $(RELEASE)
	$(BIN)/python -c "from setuptools import build_meta; build_meta.build_sdist('$(RELEASE)')" >$(RELEASE)/log
	$(BIN)/python -m pip wheel --quiet --no-deps --no-build-isolation --wheel-dir $(RELEASE) \
	  $(RELEASE)/*.tar.gz
	$(PYTHON) -m venv $(RELEASE)/venv
	$(RELEASE)/venv/bin/python -m pip install --quiet --disable-pip-version-check \
	  -c $(LOCK) $(RELEASE)/*.whl
	SPECJAX_RELEASE=$(RELEASE) $(BIN)/python -m pytest tests/lab/test_wheel.py
	@! grep -nr 'github.com/.*OWNER/' README.md notebooks || { echo "OWNER is no address to clone." >&2; exit 1; }

# JAX 0.10 is the last one for Python 3.11.
PIN := uv pip compile setup.cfg --all-extras --universal --fork-strategy fewest --no-annotate \
  --custom-compile-command 'make lock' --upgrade

lock:  ## newest versions for Python 3.11, and for 3.12 on, into both lock files (needs uv)
	$(PIN) --python-version 3.11 --output-file requirements.lock
	$(PIN) --python-version 3.12 --output-file requirements-newest.lock

clean:  ## everything but the sources and runs/
	rm -rf .venv build site *.egg-info .pytest_cache .mypy_cache .ruff_cache .jax_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

# An interpreter that is too old is named at once, and a .venv that already works is kept.
$(BIN)/pip:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { \
	  echo "specjax needs Python 3.11 or newer, but '$(PYTHON)' is" \
	    "$$($(PYTHON) --version 2>&1). Name another: make setup PYTHON=python3.14" >&2; exit 1; }
	$(PYTHON) -m venv .venv

.venv/setup.stamp: $(METADATA) | $(BIN)/pip
	@echo "Installing the pinned packages into .venv; the first time this downloads some 220 MB."
	$(INSTALL) -e '.[plots]'
	@touch $@

.venv/real.stamp: .venv/setup.stamp
	$(INSTALL) -e '.[gguf]'
	@touch $@

.venv/docs.stamp: .venv/setup.stamp
	$(INSTALL) -e '.[docs]'
	@touch $@

.venv/test.stamp: .venv/setup.stamp
	$(INSTALL) -e '.[test]'
	@touch $@
