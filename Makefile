# Every target sets up the environment that it needs. See `make help`.
SHELL := /bin/bash
.SHELLFLAGS := -eu -o pipefail -c
.DEFAULT_GOAL := help
.DELETE_ON_ERROR:

PYTHONS := 3.13 3.12 3.11
# The newest one found. A name may be there and not work: a shim for a version that is not installed.
PYTHON ?= $(firstword $(foreach version,$(PYTHONS),$(if $(shell python$(version) -c '' 2>/dev/null && echo yes),python$(version))) python3)
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready
WORKERS ?= 3
SUDO ?= $(if $(filter 0,$(shell id -u)),,sudo)
PYTEST := $(BIN)/python -m pytest --numprocesses $(WORKERS) --no-loadscope-reorder
PYTEST_ARGS ?=
HAPPY_PATH := tests/e2e/test_consume_dag.py::test_run_loads_every_record_once_and_ends_well
PROGRAMS := chromium jq pgbouncer prometheus
MINUTES ?= 30
SOAK_ARGS ?=
BENCH_ARGS ?= --what all
WHAT ?=
# Without byte code, each of the many Python processes that tests start compiles Tidemark again.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: help demo demo-changes bench soak check test test-all test-airflow unit matrix lint format audit programs java up down docs docs-lock lock dist clean

help: ## show this help
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/^([a-z-]+):.*## (.*)/  make \1|\2/' | column -t -s '|'

demo: $(READY) java ## load a year of flights through Airflow, kill the driver midway, check that nothing is lost
	$(BIN)/python -m demo

demo-changes: $(READY) java ## follow a changing database table through Debezium, kill and rewind the consumer, compare both tables
	$(BIN)/python -m tests.demo_changes

soak: $(READY) java ## inject random faults for MINUTES=30, then check the result
	$(BIN)/python -m tests.soak --minutes $(MINUTES) $(if $(SEED),--seed $(SEED)) $(SOAK_ARGS)

bench: $(READY) java ## measure throughput against the alternatives; writes build/bench.json
	$(BIN)/python -m benchmarks $(BENCH_ARGS)

check: lint unit ## the inner loop, below 90 s: lint and unit tests, without JDK, servers or network

test: $(READY) java ## test every claim on real servers, with a sample of the large matrices; WHERE=1 shows what costs how much
	$(BIN)/python -m tidemark.spark.build_archive
	WHERE=$(WHERE) $(PYTEST) $(PYTEST_ARGS)

test-all: export TIDEMARK_TEST_ALL = 1
test-all: export TIDEMARK_TEST_SHARD = $(SHARD)
test-all: test ## everything, or with SHARD=1/4 the first of four parts of equal cost

test-airflow: $(READY) java ## one run through Airflow, from the topic to the validated rows
	$(PYTEST) $(HAPPY_PATH) $(PYTEST_ARGS)

unit: $(READY) ## run the tests that need no server
	$(PYTEST) tests/unit $(PYTEST_ARGS)

matrix: $(READY) java ## try other versions, and store the result: make matrix WHAT=spark-4.0; docs/compatibility.md has the columns
	$(BIN)/python -m tests.matrix $(WHAT)

lint: $(READY) ## run ruff, mypy, the order of the packages, and the phrases that documents and sources avoid
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports --no-logo
	$(BIN)/python docs/phrases.py

audit: $(READY) ## look up known vulnerabilities of the locked packages in PyPI's advisories; fails for a package that cannot be looked up
	$(BIN)/uv tool run --quiet pip-audit --strict --disable-pip --no-deps --requirement requirements.txt

programs: ## install the programs that some tests need and pip cannot install, on Debian
	for program in $(PROGRAMS); do command -v "$$program" || PATH="$$PATH:/usr/sbin" command -v "$$program" || missing="$${missing:-} $$program"; done; \
	[ -z "$${missing:-}" ] || { $(SUDO) apt-get update --quiet; $(SUDO) apt-get install --yes --quiet --no-install-recommends $$missing; }

java: ## check that there is a JDK
	@java="$${JAVA_HOME:+$$JAVA_HOME/bin/}java"; version="$$("$$java" -version 2>&1 | sed -nE 's/.*version "(1\.)?([0-9]+).*/\2/p' || true)"; \
	[ "$${version:-0}" -ge 17 ] || { echo "Java 17 or newer is missing ($$java is $${version:-not there}): install a JDK, or set JAVA_HOME" >&2; exit 1; }

format: $(READY) ## format, and fix what ruff can fix
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

up: $(READY) java ## start Postgres, Kafka and Airflow; print URL and login
	$(BIN)/tidemark local up
	eval "$$($(BIN)/tidemark local env)"; $(BIN)/tidemark migrate && $(BIN)/tidemark doctor
	$(BIN)/tidemark local airflow up

down: $(READY) ## stop what `make up` started and keep the data
	$(BIN)/tidemark local airflow down
	$(BIN)/tidemark local down

dist: $(READY) ## build what a release has, into build/dist: the wheel, the source, and the constraints of an installation
	rm -rf build/dist
	$(BIN)/python -m hatchling build -t wheel -t sdist -d build/dist
	cp constraints/*.txt build/dist
	sed -nE 's/^([^ #]+==[^\\]*[^ \\]).*/\1/p' requirements.txt > build/dist/constraints.txt

docs: $(READY) build/docs-env/.ready ## the documentation site, strictly; build/site
	$(BIN)/python docs/site.py
	NO_MKDOCS_2_WARNING=1 build/docs-env/bin/mkdocs build --quiet --strict --config-file build/mkdocs.yml
	$(BIN)/python docs/site.py --markdown

build/docs-env/.ready: docs/requirements.txt | $(READY)
	$(BIN)/uv venv --quiet --allow-existing --python $(BIN)/python build/docs-env
	VIRTUAL_ENV=build/docs-env $(BIN)/uv pip sync --quiet --require-hashes docs/requirements.txt
	@touch $@

docs-lock: $(READY) ## compile docs/requirements.txt from the group `docs` of pyproject.toml
	$(BIN)/uv pip compile --group docs --universal --python-version 3.11 --generate-hashes --no-header --quiet --output-file docs/requirements.txt

lock: $(READY) ## compile requirements.txt from pyproject.toml, one lock for every Python
	$(BIN)/uv pip compile pyproject.toml --universal --all-extras --generate-hashes --python-version 3.11 --no-header --quiet --output-file requirements.txt

clean: ## remove the environment, caches and the embedded servers' data
	@if [ -x $(BIN)/tidemark ]; then $(MAKE) --no-print-directory down; fi
	rm -rf $(VENV) .tidemark build .pytest_cache .mypy_cache .ruff_cache .hypothesis

# The environment: pip installs uv from its hashed lines in the lock file, then uv installs everything else.
$(READY): requirements.txt pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit("%d.%d" % sys.version_info[:2] not in "$(PYTHONS)".split())' 2>/dev/null || { \
	  echo "Tidemark needs Python 3.11, 3.12 or 3.13: install one, or name it with make PYTHON=/path/to/python3.12" >&2; exit 1; }
	@[ -x $(BIN)/python ] || $(PYTHON) -m venv $(VENV)
	@[ -x $(BIN)/uv ] || $(BIN)/pip install --quiet --disable-pip-version-check --require-hashes --no-deps -r <(sed -n '/^uv==/,/[^\\]$$/p' requirements.txt)
	VIRTUAL_ENV=$(VENV) $(BIN)/uv pip sync --quiet --require-hashes --compile-bytecode requirements.txt
	VIRTUAL_ENV=$(VENV) $(BIN)/uv pip install --quiet --no-deps --no-build-isolation --editable .
	@touch $@
