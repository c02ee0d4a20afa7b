# Everything starts from `make`: each target brings the environment it needs. See `make help`.
SHELL := /bin/bash
.SHELLFLAGS := -eu -o pipefail -c
.DEFAULT_GOAL := help
.DELETE_ON_ERROR:

PYTHON ?= python3.11
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready
PYTEST_ARGS ?=
MINUTES ?= 30
SOAK_ARGS ?=
BENCH_ARGS ?= --what all
FURTHER_PYTHONS ?= 3.12 3.13

.PHONY: help demo bench soak test unit versions lint format up down lock clean

help: ## show this
	@grep -hE '^[a-z]+:.*##' $(MAKEFILE_LIST) | sed -E 's/^([a-z]+):.*## (.*)/  make \1|\2/' | column -t -s '|'

demo: $(READY) ## load a year of flights through Airflow, kill the driver on the way, reconcile
	$(BIN)/python -m tidemark.local.demo

soak: $(READY) ## random faults for MINUTES=30, and a checker that judges what is left
	$(BIN)/python -m tests.soak --minutes $(MINUTES) $(if $(SEED),--seed $(SEED)) $(SOAK_ARGS)

bench: $(READY) ## throughput and ratios against what one would take instead; build/bench.json
	$(BIN)/python -m benchmarks $(BENCH_ARGS)

test: $(READY) ## all tests, on real servers
	$(BIN)/python -m tidemark.spark.archive
	$(BIN)/python -m pytest --numprocesses 2 --no-loadscope-reorder $(PYTEST_ARGS)

unit: $(READY) ## the tests that need no server
	$(BIN)/python -m pytest tests/unit $(PYTEST_ARGS)

versions: $(READY) ## the unit tests under each further Python; one that is missing is skipped
	@for version in $(FURTHER_PYTHONS); do \
	  python="$$($(BIN)/uv python find --no-python-downloads "$$version" 2>/dev/null)" || { echo "skipped: Python $$version is missing"; continue; }; \
	  echo "Python $$version: $$python"; \
	  venv="build/python$$version"; \
	  [ -x "$$venv/bin/python" ] || $(BIN)/uv venv --quiet --python "$$python" "$$venv"; \
	  $(BIN)/uv pip sync --quiet --python "$$venv/bin/python" --require-hashes requirements.txt; \
	  $(BIN)/uv pip install --quiet --python "$$venv/bin/python" --no-deps --no-build-isolation --editable .; \
	  "$$venv/bin/python" -m pytest tests/unit $(PYTEST_ARGS); \
	done

lint: $(READY) ## ruff, mypy, import direction
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: $(READY) ## what ruff can mend
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

up: $(READY) ## Postgres, Kafka and Airflow, kept running; prints URL and login
	$(BIN)/tidemark local up
	eval "$$($(BIN)/tidemark local env)"; $(BIN)/tidemark migrate
	$(BIN)/tidemark local airflow up

down: $(READY) ## stop what `make up` started; data are kept
	$(BIN)/tidemark local airflow down
	$(BIN)/tidemark local down

lock: $(READY) ## compile requirements.txt from pyproject.toml, one lock for every Python
	$(BIN)/uv pip compile pyproject.toml --universal --all-extras --generate-hashes --python-version 3.11 --no-header --quiet --output-file requirements.txt

clean: ## remove the environment, caches and the embedded servers' data
	@if [ -x $(BIN)/tidemark ]; then $(MAKE) --no-print-directory down; fi
	rm -rf $(VENV) .tidemark build .pytest_cache .mypy_cache .ruff_cache .hypothesis

# The environment: uv first, by its own hashed lines of the lock, then everything else with uv.
$(READY): requirements.txt pyproject.toml
	@command -v $(PYTHON) >/dev/null || { echo "Python 3.11 is missing: install it, or name one with make PYTHON=/path/to/python3.11" >&2; exit 1; }
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info[:2] != (3, 11))' || { echo "$(PYTHON) is $$($(PYTHON) --version), Tidemark needs Python 3.11: name one with make PYTHON=/path/to/python3.11" >&2; exit 1; }
	@java="$${JAVA_HOME:+$$JAVA_HOME/bin/}java"; version="$$("$$java" -version 2>&1 | sed -nE 's/.*version "(1\.)?([0-9]+).*/\2/p' || true)"; \
	[ "$${version:-0}" -ge 17 ] || { echo "Java 17 or newer is missing ($$java is $${version:-not there}): install a JDK, or set JAVA_HOME" >&2; exit 1; }
	@[ -x $(BIN)/python ] || $(PYTHON) -m venv $(VENV)
	@[ -x $(BIN)/uv ] || $(BIN)/pip install --quiet --disable-pip-version-check --require-hashes --no-deps -r <(sed -n '/^uv==/,/[^\\]$$/p' requirements.txt)
	VIRTUAL_ENV=$(VENV) $(BIN)/uv pip sync --quiet --require-hashes --compile-bytecode requirements.txt
	VIRTUAL_ENV=$(VENV) $(BIN)/uv pip install --quiet --no-deps --no-build-isolation --editable .
	@touch $@
