# Each target makes what it needs. GNU make 3.81 (the one that macOS ships) is enough.
#
#   make demo PYTHON=python3.12      with another Python (3.11 or newer)
#   make test VENV=/tmp/venv         in another virtual environment
#   make test WORKERS=2              on two cores rather than all
#   make test ARGS='-k layout'       only some of the tests

PYTHON  ?= python3
VENV    ?= .venv
WORKERS ?= auto
ARGS    ?=

BIN     := $(VENV)/bin
PIP     := $(BIN)/python -m pip --disable-pip-version-check install --quiet
RUN     := $(VENV)/.installed-run
DEV     := $(VENV)/.installed-dev

PYTEST  := $(BIN)/python -m pytest -n $(WORKERS) --dist worksteal

.PHONY: help demo test test-all test-slow check lint format venv clean
.DELETE_ON_ERROR:

help:
	@echo 'make demo       the whole job on a tiny model: create, push, pull, run, replay'
	@echo 'make test       the tests, in minutes'
	@echo 'make test-all   them, and what needs other programs or takes long'
	@echo 'make test-slow  loops of many minutes'
	@echo 'make lint       ruff, mypy, lint-imports'
	@echo 'make check      lint and test: what must pass before a change goes in'
	@echo 'make format     let ruff format and fix what it can'
	@echo 'make venv       a virtual environment in $(VENV) with everything for development'
	@echo 'make clean      remove caches and build outputs; $(VENV) stays'

demo: $(RUN)
	@$(BIN)/python examples/demo.py

test: $(DEV)
	$(PYTEST) -m 'not integration and not slow' $(ARGS)

test-all: $(DEV)
	$(PYTEST) -m 'not slow' $(ARGS)

test-slow: $(DEV)
	$(PYTEST) -m slow $(ARGS)

lint: $(DEV)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

check: lint test

format: $(DEV)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

venv: $(DEV)

# A venv that could not be made in full loses its python, so that the next make tries again.
$(BIN)/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	  { echo 'aimage needs Python 3.11 or newer: make ... PYTHON=python3.12' >&2; exit 1; }
	$(PYTHON) -m venv $(VENV) || { rm -f $(BIN)/python; exit 1; }

$(RUN): pyproject.toml | $(BIN)/python
	$(PIP) -e '.[mlx,server]'
	@touch $@

# What development needs holds what the demo needs.
$(DEV): pyproject.toml | $(BIN)/python
	$(PIP) -e '.[dev]'
	@touch $(RUN) $@

clean:
	rm -rf build dist demo-output .pytest_cache .mypy_cache .ruff_cache .hypothesis \
	  .import_linter_cache
	find . -name __pycache__ -type d -not -path './.venv/*' -not -path './.git/*' \
	  -prune -exec rm -rf {} +
