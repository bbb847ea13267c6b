# `make run` starts Farhand, `make test` runs its tests. Both install what they need into .venv.
# Requires Python 3.11 or newer, make and access to the Python package index.

PYTHON ?= python3
VENV   ?= .venv
BIN     = $(VENV)/bin
ARGS   ?=
WORKERS ?= auto
PIP     = $(BIN)/python scripts/pip-install
# The sources of the web console, which is built when Farhand is installed (hatch_build.py).
CONSOLE = hatch_build.py $(shell find console -type f -not -path '*/node_modules/*')

.PHONY: run test test-fast check format lint types layers coverage siege bench bench-peers conformance codex docs lock clean help

help:             ## list the targets
	@grep -E '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed 's/:.*##/\t/'

run: $(VENV)/.run-ready $(VENV)/.console-ready   ## install into an isolated environment and start the gateway with this machine as a node
	$(BIN)/farhand up $(ARGS)

test: $(VENV)/.dev-ready $(VENV)/.console-ready  ## run all tests (fault tests in their short form)
	$(BIN)/python -m pytest -n $(WORKERS) --dist worksteal $(ARGS)

test-fast: $(VENV)/.dev-ready  ## run the unit and contract tests
	$(BIN)/python -m pytest -n $(WORKERS) --dist worksteal tests/unit tests/contract $(ARGS)

check: format lint types layers test   ## run everything that CI runs: format, lint, types, import layers, tests

format: $(VENV)/.dev-ready   ## check the formatting
	$(BIN)/ruff format --check .

lint: $(VENV)/.dev-ready     ## run the linter
	$(BIN)/ruff check .

types: $(VENV)/.dev-ready    ## check types (strict)
	$(BIN)/mypy

layers: $(VENV)/.dev-ready   ## check that packages import only from the layers below
	$(BIN)/lint-imports

coverage: $(VENV)/.dev-ready ## report which lines of src the unit and contract tests run
	$(BIN)/coverage run -m pytest -n $(WORKERS) tests/unit tests/contract $(ARGS)
	$(BIN)/coverage combine --quiet
	$(BIN)/coverage report

siege: $(VENV)/.dev-ready ## run the long form of the fault and property tests and print their counts
	FARHAND_SIEGE=long $(BIN)/python -m pytest -m "siege or hypothesis" --timeout=3600 -rP $(ARGS)

bench: $(VENV)/.bench-ready bench-peers   ## measure everything beside its peers, into benchmarks/results (an hour)
	$(BIN)/python -m benchmarks.everything $(ARGS)

bench-peers: benchmarks/peers/node_modules   ## install the peers that benchmarks compare with, from npm (850 MB)

benchmarks/peers/node_modules: benchmarks/peers/package.json
	npm install --prefix benchmarks/peers --no-audit --no-fund --ignore-scripts --loglevel=error
	@touch $@

conformance: $(VENV)/.dev-ready   ## run the official MCP conformance suite (needs npm)
	$(BIN)/python scripts/conformance.py

codex: $(VENV)/.dev-ready   ## run Codex on Farhand's Responses API; installs it from npm into build/codex (400 MB)
	npm install --prefix build/codex --no-audit --no-fund --loglevel=error @openai/codex
	FARHAND_CODEX=$(CURDIR)/build/codex/node_modules/.bin/codex $(BIN)/python -m pytest tests/integration/http/test_other_clients.py

docs: $(VENV)/.dev-ready   ## build the documentation site into site/
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --quiet
	@echo "Open site/index.html. With search: $(BIN)/python -m http.server --bind 127.0.0.1 --directory site 8000"

release: $(VENV)/.dev-ready   ## build wheel, sdist, bills of materials and checksums into dist (ARGS="--key FILE" signs them)
	$(BIN)/python scripts/release.py $(ARGS)

lock:             ## resolve the development dependencies again into requirements/*.lock (needs uv)
	uv pip compile --quiet --universal --python-version 3.11 --generate-hashes --no-emit-index-url --no-emit-find-links \
		--no-annotate --no-header --extra dev pyproject.toml --output-file requirements/dev.lock
	uv pip compile --quiet --universal --python-version 3.11 --generate-hashes --no-emit-index-url --no-emit-find-links \
		--no-annotate --no-header requirements/clients.in --output-file requirements/clients.lock

clean:            ## remove the environment and build output
	rm -rf $(VENV) build dist site

$(VENV)/bin/python:
	sh scripts/make-venv $(PYTHON) $(VENV)

$(VENV)/.run-ready: $(VENV)/bin/python pyproject.toml
	@echo "Installing Farhand into $(VENV) (about a minute the first time) ..."
	$(PIP) -e .
	@touch $@ $(VENV)/.console-ready

$(VENV)/.console-ready: $(VENV)/bin/python $(CONSOLE)
	@echo "Building the web console ..."
	$(PIP) --no-deps -e .
	@touch $@

$(VENV)/.dev-ready: $(VENV)/bin/python pyproject.toml requirements/dev.lock requirements/clients.lock
	@echo "Installing the development environment into $(VENV) (a few minutes the first time) ..."
	$(PIP) --require-hashes --requirement requirements/dev.lock
	$(PIP) --no-deps -e .
	sh scripts/install-test-servers
	sh scripts/install-test-clients $(PYTHON) $(VENV)/clients
	@touch $@ $(VENV)/.run-ready $(VENV)/.console-ready

$(VENV)/.bench-ready: $(VENV)/.dev-ready
	$(PIP) -e '.[dev,bench]'
	sh scripts/install-debian wrk openssh-server openssh-client
	@touch $@
