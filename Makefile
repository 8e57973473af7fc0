# Needs Python 3.11 to 3.14 with venv, make, and access to the package registry. Nothing else.

PYTHON ?= python3
VENV := .venv
PY := $(VENV)/bin/python
PIP := $(PY) -m pip --disable-pip-version-check --quiet
STAMP := $(VENV)/.installed
LOCK ?= requirements.lock
MEMBERS := libs/common libs/link libs/edge libs/client services/storage services/replicator services/api \
	services/consumer-gateway services/serve spark examples/flights

# Keep bytecode, whatever the caller's environment says: a server starts in half the time.
export PYTHONPYCACHEPREFIX := $(CURDIR)/$(VENV)/pycache
unexport PYTHONDONTWRITEBYTECODE

# auto: two workers per core. An idle worker takes half of another's tests.
WORKERS ?= auto
SIDE_BY_SIDE := -n $(WORKERS) --dist worksteal
CHECKS := check-code check-types

.DEFAULT_GOAL := help
.PHONY: help install run quick test test-all sim chaos chaos-spark check $(CHECKS) format bench tour structure blocking openapi wheels secrets lock clean

help: ## list the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  make %-11s %s\n", $$1, $$2}' Makefile

install: $(STAMP) ## create .venv with pinned, hash-checked packages (again: nothing to do)
	@echo "ready: $(VENV)"

run: $(STAMP) ## serve, publish 336,776 real flights, consume, report with Spark (ONCE=1: then end)
	@$(PY) -m contrail_flights $(if $(filter 1,$(ONCE)),--once)

quick: $(STAMP) ## while you work: unit tests, scenarios, and the public API of one process
	@$(PY) -m pytest $(SIDE_BY_SIDE) -m "not slow and not long and not other_form" \
		tests/unit tests/scenarios tests/contract

test: $(STAMP) ## before a pull request: everything but slow crash trials
	@$(PY) -m pytest $(SIDE_BY_SIDE) -m "not slow"

test-all: $(STAMP) ## after a change to log, store or recovery: every test, and more examples of the models
	@HYPOTHESIS_PROFILE=full $(PY) -m pytest $(SIDE_BY_SIDE)

sim: $(STAMP) ## random faults for simulated clusters, in virtual time (SEEDS=200, FIRST=1000, SECONDS=20)
	@PYTHONHASHSEED=0 $(PY) -m tests.sim.run $(or $(FIRST),1000) $(or $(SEEDS),200) \
		--seconds $(or $(SECONDS),20) --jobs $$(nproc)

chaos: $(STAMP) ## random faults for a cluster under load, and checks of its promises (MINUTES=10, SEED=n)
	@$(PY) -m tests.chaos --minutes $(or $(MINUTES),10) $(if $(SEED),--seed $(SEED))

chaos-spark: $(STAMP) ## kill drivers, executors and nodes below Spark jobs, and compare the results (KILLS=20, SEED=n)
	@$(PY) -m tests.spark.kills --kills $(or $(KILLS),20) $(if $(SEED),--seed $(SEED))

check: $(STAMP) ## format, lint, types, import contracts, tidiness, drift of what is generated
	@$(MAKE) --no-print-directory --keep-going --jobs $(CHECKS)

# mypy takes as long as all other checks together, so it runs beside them.
check-types: $(STAMP)
	@$(PY) -m mypy --no-error-summary

check-code: $(STAMP)
	@$(PY) -m ruff format --check --quiet .
	@$(PY) -m ruff check --quiet .
	@$(VENV)/bin/lint-imports --no-cache > $(VENV)/lint-imports.log || { cat $(VENV)/lint-imports.log; exit 1; }
	@$(PY) -m pytest -q --durations=0 --durations-min=5 tests/test_tidy.py
	@$(PY) -m contrail_serve.openapi_export --check

format: $(STAMP) ## put the code into the one format
	@$(PY) -m ruff format --quiet .
	@$(PY) -m ruff check --fix --quiet .

bench: $(STAMP) ## measure on this machine and write docs/benchmarks.md (SCALE=1: much of all; CLUSTER=1: three nodes)
	@$(PY) -m tests.bench $(if $(filter 1,$(SCALE)),--scale) $(if $(filter 1,$(CLUSTER)),--cluster)

tour: $(STAMP) ## follow one publish and one delivery through the code, file by file
	@$(PY) -m tests.walkthrough

structure: $(STAMP) ## how easily the code is found and followed, in figures
	@$(PY) -m tests.checks.structure

blocking: $(STAMP) ## write the blocking client from the asynchronous one
	@$(PY) -m tests.checks.blocking

openapi: $(STAMP) ## write openapi/openapi.json from the declared routes
	@$(PY) -m contrail_serve.openapi_export

# Wheels are named by path, so that no index can supply another distribution of the same name.
wheels: $(STAMP) ## build the distributions into dist/, to be installed elsewhere (docs/running.md)
	@rm -rf dist
	@$(PIP) wheel --no-deps --no-build-isolation --wheel-dir dist $(MEMBERS:%=./%)
	@sed -n 's/^\([A-Za-z0-9._-]*==[^ ]*\).*/\1/p' requirements.lock > dist/constraints.txt
	@echo '-c constraints.txt' > dist/server.txt
	@for wheel in $$(ls dist/*.whl | grep -v -e spark -e flights); do \
		name=$${wheel#dist/}; echo "$${name%%-*} @ file://$(CURDIR)/$$wheel"; \
	done >> dist/server.txt
	@echo "ready: dist"

# A container sees a file as it is here, and runs as a user this machine does not have: the folder keeps
# others out, not the files.
secrets: secrets/token.txt secrets/cluster_secret.txt ## make what docker-compose.yml hands to its containers
	@echo "ready: secrets"

secrets/%.txt:
	@mkdir -p -m 700 secrets
	@LC_ALL=C tr -dc 'A-Za-z0-9' < /dev/urandom | head -c 43 > $@
	@chmod 444 $@

# One resolution serves every supported Python and platform: no package of the list depends on either.
lock: ## resolve requirements.in anew, and that of the generators (needs uv)
	for folder in . tests/generated_clients/python; do \
		uv pip compile --quiet --no-config --upgrade --generate-hashes \
			--python-version 3.11 --python-platform linux --no-emit-index-url --no-emit-find-links \
			--custom-compile-command "make lock" $$folder/requirements.in \
			--output-file $$folder/requirements.lock || exit; \
	done

clean: ## remove .venv and caches
	rm -rf $(VENV) .pytest_cache .mypy_cache .ruff_cache .hypothesis .import_linter_cache
	find . -name __pycache__ -type d -not -path './.git/*' -prune -exec rm -rf {} +

# setuptools goes first: three packages ship as source, and building them must not fetch an unpinned one.
# Their wheels are unpacked at once; compressing Spark's jars for that takes longer than anything else here.
$(STAMP): $(LOCK) $(MEMBERS:%=%/pyproject.toml)
	@$(PYTHON) -c 'import sys; sys.exit(not (3, 11) <= sys.version_info[:2] < (3, 15))' || { \
		echo "Contrail needs Python 3.11 to 3.14; $(PYTHON) is $$($(PYTHON) --version 2>&1)." >&2; \
		echo "Name another one: make install PYTHON=python3.12" >&2; exit 1; }
	@test -x $(PY) || $(PYTHON) -m venv $(VENV) || { \
		rm -rf $(VENV); echo "Python's venv module is missing (Debian: apt install python3-venv)." >&2; exit 1; }
	@echo "Installing into $(VENV) (the first time: about 700 MB, a few minutes) ..."
	@sed -n '/^setuptools==/,/# via/p' $(LOCK) > $(VENV)/build.txt
	@$(PIP) install --require-hashes --no-deps -r $(VENV)/build.txt
	@$(PIP) install --require-hashes --no-deps --no-build-isolation --use-pep517 --no-compile \
		--config-settings=--build-option=--compression=stored -r $(LOCK)
	@$(PIP) install --no-deps --no-build-isolation $(MEMBERS:%=-e %)
	@touch $@
