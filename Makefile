# Each target does all the set-up it needs: `make test` and `make demo` work in a fresh clone.
# Another interpreter (3.10 or newer):  make test PYTHON=python3.12

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
# The demo needs fewer packages than the tests do and benchmarks need more, so they have stamps of their own.
READY := $(VENV)/.ready
DEMO_READY := $(VENV)/.ready-demo
BENCH_READY := $(VENV)/.ready-bench
# The KFAC baseline is held against these. Without their dependencies, because one of them asks for torchvision, which
# has no build for a CPU-only torch and which the functions that are used here do not need.
ORACLES := curvlinops-for-pytorch==3.0.1 einconv==0.1.0 einops==0.8.2 linear_operator==0.6.1
CODE := $(wildcard src tests examples benchmarks docs)
BENCH_JSON ?= runs/overhead.json

.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
.PHONY: help setup test fast lint format demo bench docs clean
# Targets share one environment and one terminal: run them one after the other even under `make -j`.
.NOTPARALLEL:

help:
	@echo "make test    set up, then check format, lint, types and run all tests and doctests"
	@echo "make demo    set up, then run examples/demo.py"
	@echo "make fast    the tests that are not marked slow"
	@echo "make lint    format check, lint and types without tests"
	@echo "make format  rewrite the files in the project's format"
	@echo "make bench   measure overhead, write $(BENCH_JSON)"
	@echo "make docs    build the documentation's site into site/"
	@echo "make clean   remove the environment, caches and build products"

setup: $(READY)

$(BIN)/python:
	@echo "==> creating $(VENV) with $(PYTHON)"
	@$(PYTHON) -c 'import sys; v = sys.version_info; sys.exit(None if v >= (3, 10) else \
		"apo needs Python 3.10 or newer, this is %d.%d: run make PYTHON=/path/to/a/newer/python" % v[:2])'
	@$(PYTHON) -m venv $(VENV)

# Project and constraints go to pip in one call: torch is resolved once, to the pinned build.
$(READY): pyproject.toml constraints.txt src/apo/_version.py | $(BIN)/python
	@echo "==> installing apo and its development tools into $(VENV)"
	@$(BIN)/python -m pip install --quiet --upgrade pip
	@$(BIN)/python -m pip install --quiet -c constraints.txt -e ".[dev]"
	@$(BIN)/python -m pip install --quiet -c constraints.txt --no-deps $(ORACLES)
	@touch $@

$(DEMO_READY): pyproject.toml constraints.txt src/apo/_version.py | $(BIN)/python
	@echo "==> installing apo and what the demo needs into $(VENV)"
	@$(BIN)/python -m pip install --quiet --upgrade pip
	@$(BIN)/python -m pip install --quiet -c constraints.txt -e ".[demo]"
	@touch $@

$(BENCH_READY): $(READY)
	@echo "==> installing the packages that the benchmarks compare with"
	@$(BIN)/python -m pip install --quiet -c constraints.txt -e ".[dev,bench]"
	@touch $@

# The tests run on all cores already: one thread for each of them and for the processes they start.
test fast: export OMP_NUM_THREADS := 1

# Tests that start processes of their own come last and one at a time: they need the cores for themselves.
test: lint
	@echo "==> tests and doctests"
	@$(BIN)/python -m pytest -n 2 --dist worksteal -m "not distributed"
	@echo "==> tests that train with many processes"
	@$(BIN)/python -m pytest -m distributed tests/distributed

fast: $(READY)
	@echo "==> tests that are not slow"
	@$(BIN)/python -m pytest -n 2 --dist worksteal -m "not slow and not distributed"

lint: $(READY)
	@echo "==> format"
	@$(BIN)/python -m ruff format --check $(CODE)
	@echo "==> lint"
	@$(BIN)/python -m ruff check $(CODE)
	@echo "==> types"
	@$(BIN)/python -m pyright --pythonpath $(BIN)/python

format: $(READY)
	@echo "==> rewriting $(CODE)"
	@$(BIN)/python -m ruff format $(CODE)
	@$(BIN)/python -m ruff check --fix $(CODE)

demo: $(DEMO_READY)
	@echo "==> examples/demo.py"
	@$(BIN)/python examples/demo.py

bench: $(BENCH_READY)
	@echo "==> benchmarks/overhead.py, results in $(BENCH_JSON)"
	@mkdir -p $(dir $(BENCH_JSON))
	@$(BIN)/python benchmarks/overhead.py --json $(BENCH_JSON)

# The variable silences an advertisement of the theme, which would read like a warning.
docs: $(READY)
	@echo "==> the documentation, in site/"
	@NO_MKDOCS_2_WARNING=1 PYTHONPATH=src $(BIN)/python -m mkdocs build --strict --quiet
	@echo "open site/index.html, or serve the folder: $(BIN)/python -m http.server --directory site"

clean:
	@echo "==> removing $(VENV), caches and build products"
	@rm -rf $(VENV) build dist site .pytest_cache .ruff_cache *.egg-info src/*.egg-info
	@find $(CODE) -name __pycache__ -type d -prune -exec rm -rf {} +
