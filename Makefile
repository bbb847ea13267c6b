# Two words do everything: `make run` starts Farhand, `make test` proves it.
# Needs Python 3.11 or newer, make, and the package index.

PYTHON ?= python3
VENV   ?= .venv
BIN     = $(VENV)/bin
ARGS   ?=
WORKERS ?= auto

.PHONY: run test check format lint types rooms siege bench bench-peers clean help

help:             ## what can be made
	@grep -E '^[a-z]+:.*##' $(MAKEFILE_LIST) | sed 's/:.*##/\t/'

run: $(VENV)/.run-ready   ## install into an isolated environment and start the gateway with this machine as a node
	$(BIN)/farhand up $(ARGS)

test: $(VENV)/.dev-ready  ## all tests (the siege runs in their short form)
	$(BIN)/python -m pytest -n $(WORKERS) $(ARGS)

check: format lint types rooms test   ## what CI runs: format, lint, strict types, room order, tests

format: $(VENV)/.dev-ready
	$(BIN)/ruff format --check .

lint: $(VENV)/.dev-ready
	$(BIN)/ruff check .

types: $(VENV)/.dev-ready
	$(BIN)/mypy

rooms: $(VENV)/.dev-ready
	$(BIN)/lint-imports

siege: $(VENV)/.dev-ready ## the long runs of kills and faults, with how often each was tried and held
	FARHAND_SIEGE=long $(BIN)/python -m pytest -m siege --timeout=3600 -rP $(ARGS)

bench: $(VENV)/.bench-ready bench-peers   ## measure everything beside its peers, into benchmarks/results (half an hour)
	$(BIN)/python -m benchmarks.everything $(ARGS)

bench-peers: benchmarks/peers/node_modules   ## what others offer, from the npm registry (850 MB)

benchmarks/peers/node_modules: benchmarks/peers/package.json
	npm install --prefix benchmarks/peers --no-audit --no-fund --ignore-scripts --loglevel=error
	@touch $@

clean:
	rm -rf $(VENV) build dist

$(VENV)/bin/python:
	sh scripts/make-venv $(PYTHON) $(VENV)

$(VENV)/.run-ready: $(VENV)/bin/python pyproject.toml
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -e .
	@touch $@

$(VENV)/.dev-ready: $(VENV)/bin/python pyproject.toml
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -e '.[dev]'
	sh scripts/install-test-servers
	@touch $@ $(VENV)/.run-ready

$(VENV)/.bench-ready: $(VENV)/.dev-ready
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -e '.[dev,bench]'
	sh scripts/install-debian wrk openssh-server openssh-client
	@touch $@
