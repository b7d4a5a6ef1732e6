# Everything here runs in .venv, which the targets create and re-use. `make help` lists them.
# V=1 shows all that pip prints. PYTHON=/path/to/python3.12 chooses the interpreter.

SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help
MAKEFLAGS += --no-print-directory

VENV := .venv
PY := $(VENV)/bin/python
PIP := $(PY) -m pip --disable-pip-version-check install $(if $(V),,-qq) -c constraints.txt

# The first interpreter on the path that is new enough.
PYTHON ?= $(shell for p in python3.11 python3.12 python3.13 python3 python; do \
	$$p -c 'import sys; sys.exit(sys.version_info < (3, 11))' >/dev/null 2>&1 && { echo $$p; break; }; done)

# Empty when .venv is absent or its interpreter is gone (an upgrade of Python): then it is rebuilt.
VENV_RUNS := $(shell $(PY) -c '' >/dev/null 2>&1 && echo yes)

CREATED := $(VENV)/.created
CORE := $(VENV)/.core
DEV := $(VENV)/.dev
ZOO := $(VENV)/.zoo

# One compute thread per process: the tests run in parallel processes, and two OpenMP threads on small
# tensors were measured 20 times slower than one. No test may reach for the network.
test slow pytest fuzz lowest: export OMP_NUM_THREADS = 1
test slow pytest fuzz lowest: export MKL_NUM_THREADS = 1
test slow pytest fuzz lowest: export HF_HUB_OFFLINE = 1
test slow pytest fuzz lowest: export TOKENIZERS_PARALLELISM = false
# The tests start many processes: they share one compilation of src/, even where the environment
# forbids bytecode (an empty value permits it).
test slow pytest fuzz lowest: export PYTHONDONTWRITEBYTECODE =

.PHONY: help demo test pytest fuzz lowest lint format types layers bench slow docs dist clean FORCE

MINUTES ?= 20

help: ## list the targets
	@awk -F ':.*## ' '/^[a-z]+:.*## / {printf "  make %-8s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

demo: $(CORE) ## set up, then the first hour in minutes: train, trace, profile, export, write, report
	@$(PY) examples/demo.py

# Types beside the tests: basedpyright uses one core, and waits for none of them.
test: lint layers ## set up, then lint, types, layering and tests: what CI runs
	@$(MAKE) -j2 types pytest

pytest: $(DEV) ## the tests alone; ARGS="tests/stream -k cursor" chooses
	$(PY) -m pytest $(ARGS)

slow: $(DEV) $(ZOO) ## the tests that take minutes
	$(PY) -m pytest -m slow $(ARGS)

# New examples every time; a failing one is printed as the call that fails. One that never ends fails.
fuzz: export EVERYDEPTH_FUZZ = $(MINUTES)
fuzz: $(DEV) ## odd arguments, command lines and damaged files; MINUTES=20 is how long
	$(PY) -m pytest tests/fuzz -n 2 --timeout 3600 $(ARGS)

# What it tried is written into constraints-lowest.txt by hand; a test compares it with pyproject.toml.
lowest: $(DEV) ## a smoke suite with the lowest versions allowed, in a clean environment
	$(PY) -m pytest -m slow -n 0 -s tests/test_lowest.py $(ARGS)

lint: $(DEV) ## ruff, without changing a file
	$(PY) -m ruff check .
	$(PY) -m ruff format --check .

format: $(DEV) ## ruff, changing files
	$(PY) -m ruff check --fix .
	$(PY) -m ruff format .

types: $(DEV) ## basedpyright, strict on src/, also benchmarks and examples
	$(PY) -m basedpyright

layers: $(DEV) ## import-linter: which package may import which
	$(PY) -c 'from importlinter.cli import lint_imports_command; lint_imports_command()'

bench: $(DEV) ## every benchmark, one after the other
	@for file in $(filter-out benchmarks/record.py benchmarks/peak.py,$(wildcard benchmarks/*.py)); do \
		echo "== $$file"; $(PY) "$$file"; done

docs: $(DEV) ## the documentation, strictly, into site/
	$(PY) -m mkdocs build --strict

# `make slow ARGS=tests/test_packaging.py` installs both into clean environments and uses them.
dist: $(DEV) ## the sdist and the wheel, into dist/
	$(PY) -m build --no-isolation

clean: ## remove .venv, caches and what was built
	rm -rf $(VENV) build dist site .pytest_cache .ruff_cache .import_linter_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

$(CREATED): $(if $(VENV_RUNS),,FORCE)
	@if [ -z "$(PYTHON)" ]; then \
		echo "everydepth needs Python 3.11 or newer, and none is on the path." >&2; \
		echo "Install one, or name it: make $(or $(MAKECMDGOALS),test) PYTHON=/path/to/python3.11" >&2; exit 1; fi
	@$(PY) -m pip --version >/dev/null 2>&1 || { echo "Creating $(VENV) with $(PYTHON)"; $(PYTHON) -m venv --clear $(VENV); }
	@touch $@

# torch by itself first, at the pinned version: a CPU build that is already there satisfies it, and
# nothing that follows can pull another. hatchling from the constraints builds the package, so that
# the build too uses pinned versions.
$(CORE): $(CREATED) pyproject.toml constraints.txt
	@echo "Installing everydepth and its pinned dependencies (minutes the first time; V=1 shows progress)"
	@$(PIP) torch==2.13.0
	@$(PIP) hatchling
	@$(PIP) --no-build-isolation -e .
	@touch $@

$(DEV): $(CORE)
	@echo "Installing the tools for development (minutes the first time; V=1 shows progress)"
	@$(PIP) --no-build-isolation -e '.[dev]'
	@touch $@

# Beside the environment, not in it: torchvision without its compiled operators would be found by
# libraries that then try to use it, and so would torchao. The tests know where to look.
$(ZOO): $(DEV)
	@$(PIP) --no-deps --target $(VENV)/zoo --upgrade torchvision==0.28.0 timm==1.0.30
	@$(PIP) --no-deps --target $(VENV)/torchao --upgrade torchao==0.18.0
	@touch $@

FORCE:
