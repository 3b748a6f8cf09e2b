# Each target creates its prerequisites. GNU make 3.81, the version of macOS, is sufficient.
#
#   make demo PYTHON=python3.12      with another Python (3.11 or newer)
#   make test VENV=/tmp/venv         in another virtual environment
#   make test WORKERS=2              with two workers instead of one more than cores
#   make test ARGS='-k layout'       with more arguments for pytest
#   make install EXTRAS=mlx,hf       with other extras (docs/install.md); EXTRAS= for none
#   make install PREFIX=/usr/local   in another place than ~/.local
#   make install PACKAGE=FILE.whl    from a wheel

PYTHON  ?= python3
VENV    ?= .venv
# Many tests wait for other processes.
WORKERS ?= $(shell $(PYTHON) -c 'import os; print((os.cpu_count() or 1) + 1)')
ARGS    ?=
PREFIX  ?= $(HOME)/.local
EXTRAS  ?= all
PACKAGE ?= $(CURDIR)

BIN     := $(VENV)/bin
# Most modules of the packages are never imported: the others are compiled when they are.
PIP     := $(BIN)/python -m pip --disable-pip-version-check install --quiet --no-compile
RUN     := $(VENV)/.installed-run
DEV     := $(VENV)/.installed-dev
DOCS    := build/docs-venv
TOOLS   := build/tools-venv
PROGRAM := $(PREFIX)/share/aimage-venv
LINK    := $(PREFIX)/bin/aimage
IMAGES  := deploy/docker

# The tests start many processes: each would compile the program again.
export PYTHONDONTWRITEBYTECODE :=

CHECK_PYTHON := $(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
  { echo 'aimage needs Python 3.11 or newer: make ... PYTHON=python3.12' >&2; exit 1; }
PYTEST  := $(BIN)/python -m pytest -n $(WORKERS) --dist worksteal

GATEWAY := openai openai_text openai_retry promises_openai ollama ollama_text ollama_pull \
  promises_ollama picture_upload picture_output control_requests reference_requests \
  enhance_requests worker_adapters content remote_live facts

.PHONY: help demo install uninstall test test-programs test-all test-slow test-quarantine test-gateway check lint fuzz format docs dist release-check lock audit venv clean
.DELETE_ON_ERROR:

help:
	@echo 'make demo       create, push, pull, run and replay a small model'
	@echo 'make install    install or upgrade aimage for this user, with a link in ~/.local/bin'
	@echo 'make uninstall  remove what make install made'
	@echo 'make test       the tests, in a few minutes'
	@echo 'make test-programs   tests with other programs, crashes, fleets and references'
	@echo 'make test-all   both of them'
	@echo 'make test-slow  soaks, load, large fuzzers: many minutes, nightly'
	@echo 'make test-quarantine   the tests that fail by chance; their failures do not count'
	@echo 'make test-gateway   the tests of the API of a worker, through a gateway'
	@echo 'make lint       ruff, mypy, lint-imports, zizmor'
	@echo 'make fuzz       damaged documents, files and requests; ARGS="--cases 1000000", ARGS=parsers'
	@echo 'make check      lint and test; must pass before a change is merged'
	@echo 'make format     format and fix the source with ruff'
	@echo 'make docs       docs/cli.md, and the documentation as a site in build/site'
	@echo 'make dist       wheel and sdist in dist, and an SBOM (CycloneDX) in build/sbom'
	@echo 'make release-check   build the distributions, install the wheel, and try it'
	@echo 'make lock       pin the packages of the images again'
	@echo 'make audit      check the pinned packages; ADVISORIES=FILE.zip, also for vulnerabilities'
	@echo 'make venv       create $(VENV) with all packages for development'
	@echo 'make clean      remove caches and build outputs, but not $(VENV)'

demo: $(RUN)
	@$(BIN)/python examples/demo.py

# The environment is the program's own: the Python of Debian, Ubuntu and Homebrew refuses packages.
# Only a link to this environment is replaced or removed.
IS_OURS := [ "$$(readlink '$(LINK)')" = '$(PROGRAM)/bin/aimage' ]

install:
	@$(CHECK_PYTHON)
	@{ [ ! -e '$(LINK)' ] && [ ! -L '$(LINK)' ]; } || $(IS_OURS) || \
	  { echo '$(LINK) was made by another program: remove it, or use PREFIX=' >&2; exit 1; }
	@$(PYTHON) -m venv '$(PROGRAM)'
	'$(PROGRAM)/bin/python' -m pip --disable-pip-version-check install --quiet --upgrade \
	  '$(PACKAGE)$(if $(EXTRAS),[$(EXTRAS)])'
	@mkdir -p '$(PREFIX)/bin'
	@ln -sf '$(PROGRAM)/bin/aimage' '$(LINK)'
	@'$(LINK)' --version
	@case ":$$PATH:" in *':$(PREFIX)/bin:'*) ;; *) \
	  echo 'Add $(PREFIX)/bin to PATH: aimage is there.' ;; esac

uninstall:
	@if $(IS_OURS); then rm '$(LINK)'; fi
	@if [ -f '$(PROGRAM)/pyvenv.cfg' ]; then rm -r '$(PROGRAM)'; fi

test: $(DEV)
	$(PYTEST) -m 'not integration and not slow and not quarantine' $(ARGS)

test-programs: $(DEV)
	$(PYTEST) -m 'integration and not slow and not quarantine' $(ARGS)

test-all: $(DEV)
	$(PYTEST) -m 'not slow and not quarantine' $(ARGS)

test-slow: $(DEV)
	$(PYTEST) -m 'slow and not quarantine' $(ARGS)

# Codes of pytest: 1 is that tests failed, 5 that there are none.
test-quarantine: $(DEV)
	$(PYTEST) -m quarantine $(ARGS) || case $$? in 1|5) ;; *) exit 1 ;; esac

# The tests of a worker's API, through a gateway on nats-server
test-gateway: $(DEV)
	$(PYTEST) --gateway -m 'not slow and not quarantine' $(addprefix tests/worker/test_,$(addsuffix .py,$(GATEWAY))) $(ARGS)

fuzz: $(DEV)
	$(BIN)/python -m tests.fuzz $(ARGS)

lint: $(DEV)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/zizmor --offline --quiet .github

check: lint test

format: $(DEV)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

# The site needs only these packages: they have an environment of their own.
docs: $(DOCS)/.installed
	$(DOCS)/bin/python docs/mkdocs_hooks.py
	NO_MKDOCS_2_WARNING=1 $(DOCS)/bin/mkdocs build --strict
	@echo build/site/index.html

$(DOCS)/.installed: pyproject.toml
	$(PYTHON) -m venv --clear $(DOCS)
	$(DOCS)/bin/python -m pip --disable-pip-version-check install --quiet --no-compile -e '.[docs]'
	@touch $@

$(TOOLS)/.installed: pyproject.toml
	$(PYTHON) -m venv --clear $(TOOLS)
	$(TOOLS)/bin/python -m pip --disable-pip-version-check install --quiet --no-compile \
	  annotated-types build click cyclonedx-bom hatchling twine uv
	@touch $@

# The SBOM lists what is installed with the wheel when the pinned packages are used, as in an image.
dist: $(TOOLS)/.installed
	rm -rf dist build/sbom build/locked
	$(TOOLS)/bin/python -m build --no-isolation --outdir dist
	$(TOOLS)/bin/twine check --strict dist/*
	$(PYTHON) -m venv --without-pip build/locked
	$(TOOLS)/bin/python -m pip --python build/locked/bin/python install --quiet --no-compile \
	  --require-hashes \
	  -r $(IMAGES)/requirements.lock
	$(TOOLS)/bin/python -m pip --python build/locked/bin/python install --quiet --no-deps dist/*.whl
	build/locked/bin/aimage --version
	mkdir build/sbom
	version=$$($(TOOLS)/bin/python -m hatchling version) && \
	  sed "s/^dynamic = .*/version = \"$$version\"/" pyproject.toml >build/sbom/pyproject.toml
	$(TOOLS)/bin/cyclonedx-py environment --output-reproducible --output-file \
	  build/sbom/clowder-aimage.cdx.json --pyproject build/sbom/pyproject.toml build/locked/bin/python
	rm build/sbom/pyproject.toml

# .ci/distributions builds them too, and tries the wheel without extras. The images are built of the
# files that .dockerignore leaves in their context.
RELEASE := $(CURDIR)/build/release
release-check: $(DEV)
	rm -rf '$(RELEASE)'
	mkdir -p '$(RELEASE)'
	.ci/distributions '$(PYTHON)' '$(CURDIR)' '$(RELEASE)'
	$(BIN)/python -m tests.deploy.release dist
	$(BIN)/python -m tests.docs.scenario '$(RELEASE)/tutorial' dist/*.whl
	$(BIN)/python -m tests.deploy.release --summary dist build/sbom '$(RELEASE)'

# For every Python and platform, with the digests of all files. The index is not named in the files.
LOCK    := $(TOOLS)/bin/uv pip compile --quiet --universal --python-version 3.11 --upgrade --no-strip-extras \
	  --generate-hashes --no-header
lock: $(TOOLS)/.installed
	$(LOCK) pyproject.toml --extra text --extra llama --extra worker --extra zstd \
	  --extra fleet --extra trust --extra c2pa \
	  -o $(IMAGES)/requirements.lock
	$(LOCK) pyproject.toml $(IMAGES)/cuda.in --extra torch --extra llama --extra worker \
	  --extra zstd --extra fleet --extra trust --extra c2pa -o $(IMAGES)/requirements-cuda.lock
	$(LOCK) $(IMAGES)/build.in -o $(IMAGES)/requirements-build.lock

# No request is made: ADVISORIES is an archive of advisories in OSV's format, one JSON file each.
audit: $(DEV)
	$(BIN)/python -m tests.deploy.lock $(ADVISORIES)

venv: $(DEV)

# If the venv cannot be created completely, its python is removed, so that the next make retries.
$(BIN)/python:
	@$(CHECK_PYTHON)
	$(PYTHON) -m venv $(VENV) || { rm -f $(BIN)/python; exit 1; }

$(RUN): pyproject.toml | $(BIN)/python
	$(PIP) -e '.[mlx,server]'
	@touch $@

# The development packages include those of the demo.
$(DEV): pyproject.toml | $(BIN)/python
	$(PIP) -e '.[dev]'
	@touch $(RUN) $@

clean:
	rm -rf build dist demo-output .pytest_cache .mypy_cache .ruff_cache .hypothesis \
	  .import_linter_cache
	find . -name __pycache__ -type d -not -path './.venv/*' -not -path './.git/*' \
	  -prune -exec rm -rf {} +
