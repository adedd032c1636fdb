# Everything works on a fresh machine: each target first makes the virtual environment that it needs.
PYTHON ?= python3
# Workers of the test run and threads of each: this is the fastest on two cores.
WORKERS ?= 2
THREADS ?= 1
PYTEST_ARGS ?=
BENCH ?=

VENV := .venv
LATEST := .venv-latest
run_tests = OMP_NUM_THREADS=$(THREADS) $(1)/bin/python -m pytest -n $(WORKERS) --durations=10 $(PYTEST_ARGS)

.DEFAULT_GOAL := help
.PHONY: help demo test test-slow test-latest notebooks lint format bench docs wheel clean

help:
	@sed -n 's/^\([a-z-]*\):.*## \(.*\)/  make \1\t\2/p' Makefile | expand -t 22

demo: $(VENV)/.stamp ## compress a small model that comes with moepress, and compare
	$(VENV)/bin/moepress demo -o out/demo

test: $(VENV)/.stamp ## the tests, with the oldest supported transformers
	$(call run_tests,$(VENV))

test-slow: $(VENV)/.stamp ## the tests that take minutes
	$(call run_tests,$(VENV)) -m slow

test-latest: $(LATEST)/.stamp ## the tests, with the newest supported transformers
	$(call run_tests,$(LATEST))

notebooks: $(VENV)/.stamp ## run the notebooks, from the first cell to the last
	$(call run_tests,$(VENV)) -m slow tests/test_notebooks.py

lint: $(VENV)/.stamp ## ruff and mypy
	$(VENV)/bin/ruff check
	$(VENV)/bin/ruff format --check
	$(VENV)/bin/mypy

format: $(VENV)/.stamp ## let ruff tidy the code
	$(VENV)/bin/ruff check --fix
	$(VENV)/bin/ruff format

bench: $(VENV)/.stamp ## list the benchmarks; BENCH="FILE.py OPTIONS" runs one
	@$(if $(BENCH),$(VENV)/bin/python benchmarks/$(BENCH),ls benchmarks)

docs: $(VENV)/.stamp ## build the docs as a site, build/site/index.html
	PYTHONPATH=src NO_MKDOCS_2_WARNING=1 $(VENV)/bin/mkdocs build --strict --quiet

wheel: $(VENV)/.stamp ## build dist/*.whl and dist/*.tar.gz
	$(VENV)/bin/python -m build

clean: ## remove environments, builds and caches
	rm -rf $(VENV) $(LATEST) build dist out/demo .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find src tests benchmarks -name __pycache__ -type d -prune -exec rm -rf {} +

$(VENV)/.stamp: constraints.txt
$(LATEST)/.stamp: constraints-latest.txt

# An environment is ready when its stamp is newer than what it is made from. One that was left half made is replaced
# if it cannot run pip, and completed if it can.
%/.stamp: pyproject.toml
	@command -v $(PYTHON) >/dev/null || { echo "there is no $(PYTHON): install Python 3.11 or newer, or say make PYTHON=..." >&2; exit 1; }
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and f"moepress needs Python 3.11 or newer, $(PYTHON) is {sys.version}: say make PYTHON=python3.11")'
	@$*/bin/python -c 'import sys, pip; sys.exit(sys.version_info < (3, 11))' 2>/dev/null || $(PYTHON) -m venv --clear $*
	@echo "installing into $*, this takes a few minutes"
	$*/bin/python -m pip install -qq --disable-pip-version-check -c $(filter constraints%,$^) -e '.[dev]'
	@touch $@
