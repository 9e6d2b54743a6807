# All chores. `make` lists them; `make setup PYTHON=… VENV=…` makes a second environment beside the first.

VENV ?= .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
UV := $(or $(shell uv --version >/dev/null 2>&1 && command -v uv),.tools/bin/uv)
PYTEST := $(BIN)/pytest --numprocesses=2 --dist=loadfile --strict-skips --durations=10

# The kernel works in the notebook's folder: at the top, its own package `comm` would be shadowed by ours.
EXECUTE := import pathlib, sys, nbclient, nbformat; path = pathlib.Path(sys.argv[1]); book = nbformat.read(path, 4); \
    where = {"metadata": {"path": str(path.parent)}}; \
    nbclient.NotebookClient(book, record_timing=False, resources=where).execute(); nbformat.write(book, path)

# Another active environment must not leak into ours.
unexport VIRTUAL_ENV PYTHONHOME PYTHONPATH

.PHONY: help setup demo test test-fast lint format bench lock notebook clean
.DEFAULT_GOAL := help

help: ## list the chores
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "make %-10s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

setup: $(STAMP) ## make the environment from requirements.lock, when it is missing or out of date

demo: $(STAMP) ## ladder, registered forecast, hero under watch, report: the main job in small
	@$(BIN)/ladder demo

test: $(STAMP) ## all tests, fast ones first
	@$(PYTEST)

test-fast: $(STAMP) ## the tests that take seconds
	@$(PYTEST) -m "not slow"

lint: $(STAMP) ## style and types
	@$(BIN)/ruff check
	@$(BIN)/ruff format --check
	@$(BIN)/basedpyright --pythonpath $(BIN)/python

format: $(STAMP) ## rewrite in the house style
	@$(BIN)/ruff check --fix
	@$(BIN)/ruff format

bench: $(STAMP) ## measure this machine
	@$(BIN)/ladder bench

notebook: $(STAMP) ## execute the tours in place, the first on the runs of `make demo` or of RUNGWISE_HOME
	@RUNGWISE_HOME=$(abspath $(or $(RUNGWISE_HOME),rungwise-runs)) $(BIN)/python -P -c '$(EXECUTE)' notebooks/tour.ipynb
	@$(BIN)/python -P -c '$(EXECUTE)' notebooks/divergence.ipynb

lock: | $(UV) ## resolve pyproject.toml into requirements.lock; the file names no registry
	@$(UV) pip compile --quiet --universal --python-version 3.11 --generate-hashes --group dev pyproject.toml \
	    --custom-compile-command 'make lock' --output-file requirements.lock

clean: ## remove caches and build leftovers; environments and runs stay
	@rm -rf .pytest_cache .ruff_cache .hypothesis build dist src/*.egg-info
	@find . -path './.venv*' -prune -o -path ./.tools -prune -o -name __pycache__ -exec rm -rf {} +

$(STAMP): requirements.lock pyproject.toml | $(UV)
	@$(BIN)/python -c '' 2>/dev/null || { python=$$(.ci/find-python) && \
	    $(UV) venv --quiet --clear --no-project --no-python-downloads --python "$$python" $(VENV); }
	@echo "installing the locked packages into $(VENV) …" >&2
	@$(UV) pip sync --quiet --python $(BIN)/python --require-hashes --compile-bytecode requirements.lock
	@$(UV) pip install --quiet --python $(BIN)/python --no-deps --editable .
	@touch $@

.tools/bin/uv:
	@python=$$(.ci/find-python) || exit 1; "$$python" -m venv --clear .tools >/dev/null || \
	    { rm -rf .tools; echo "error: $$python makes no environments; on Debian: apt-get install python3-venv" >&2; exit 1; }
	@.tools/bin/python -m pip install --quiet --disable-pip-version-check 'uv>=0.9,<1'
