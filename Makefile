# make demo   see it work                 make lint   ruff, mypy, layers, docs
# make test   the whole suite             make bench  every benchmark, --quick (make bench-full for the record)
# make soak   hours of kill -9            make docs   the pages, into site/
#
# Each target makes .venv and installs what it needs, once; a second run does no set-up again.

PYTHON ?= python3.11
ifeq ($(shell command -v $(PYTHON) 2>/dev/null),)
PYTHON := python3
endif
BIN := .venv/bin
PIP := PIP_CONSTRAINT=constraints.txt PIP_DISABLE_PIP_VERSION_CHECK=1 $(BIN)/pip install --quiet

.DEFAULT_GOAL := help
.PHONY: help demo test lint docs bench bench-full soak clean

help:
	@sed -n '1,3p' Makefile

.venv/.base:
	@echo "making .venv"
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "Sapwood needs Python 3.11 or newer: make PYTHON=/path/to/python3.11")'
	@$(PYTHON) -m venv .venv
	@touch $@

.venv/.demo: .venv/.base pyproject.toml constraints.txt
	@echo "installing Sapwood with its command line (torch is large: this takes a minute, once)"
	@$(PIP) -e '.[cli]'
	@touch $@

.venv/.dev: .venv/.base pyproject.toml constraints.txt scripts/system-packages
	@sh scripts/system-packages dev
	@echo "installing Sapwood and everything its tests need (this takes a minute or two, once)"
	@$(PIP) -e '.[dev]'
	@touch $@ .venv/.demo

.venv/.bench: .venv/.dev
	@sh scripts/system-packages bench
	@$(PIP) -e '.[bench]'
	@touch $@

demo: .venv/.demo
	@$(BIN)/sapwood demo

# Tests wait for processes about a fifth of the time: one more at a time than there are cores. Files
# keep the order of tests/conftest.py, the longest first; else those with the most tests would be.
test: .venv/.dev
	@$(BIN)/python -m pytest -n $$(($$(nproc) < 3 ? $$(nproc) + 1 : 4)) --dist loadfile --no-loadscope-reorder

lint: .venv/.dev docs
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .
	@$(BIN)/mypy
	@$(BIN)/lint-imports

docs: .venv/.dev
	@$(BIN)/zensical build --clean --strict

bench: .venv/.bench
	@for b in benchmarks/[a-z]*_*.py; do $(BIN)/python $$b --quick || exit 1; done

bench-full: .venv/.bench
	@for b in benchmarks/[a-z]*_*.py; do $(BIN)/python $$b --full || exit 1; done

# An hour of kill -9: of providers and their clients, and of writers, readers and gc of one repository.
soak: .venv/.dev
	@$(BIN)/python scripts/soak-providers --kills 500
	@$(BIN)/python scripts/soak-cluster
	@$(BIN)/python scripts/soak-store --seconds 600
	@$(BIN)/python scripts/soak-store --seconds 600 --shared

clean:
	rm -rf .venv site .mypy_cache .ruff_cache .pytest_cache .hypothesis
