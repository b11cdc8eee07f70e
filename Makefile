# Targets a reader needs; `make` alone lists them.
#
#   PIP_ARGS   extra arguments for pip install, e.g. PIP_ARGS="--extra-index-url URL" for torch's CPU build on Linux
#   DEVICE     auto, cpu or cuda        PROFILE    quick or full        PYTHON    the interpreter the .venv is made from

PYTHON   ?= python3
PIP_ARGS ?=
DEVICE   ?= auto
PROFILE  ?= quick

VENV := .venv
BIN  := $(VENV)/bin
PAGE := book/_build/html/index.html

.DEFAULT_GOAL := help
.PHONY: help install model labs record book test lint clean

help: ## list the targets
	@awk -F ':.*## ' '/^[a-z]+:.*## / {printf "make %-8s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

# The stamp is newer than what it was made from, so nothing is installed twice.
$(VENV)/.installed: pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' \
	  || { echo "Python 3.11 or newer is needed; set PYTHON=/path/to/python3.11"; exit 1; }
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt $(PIP_ARGS) -e '.[dev]'
	@touch $@

install: $(VENV)/.installed ## install kvlab and everything it needs into .venv

model: install ## fetch and convert the model, once
	@$(BIN)/kvlab model fetch

labs: model ## run the labs that changed (DEVICE, PROFILE)
	$(BIN)/kvlab labs --device $(DEVICE) --profile $(PROFILE) --stage book/labs

record: model ## run every lab in its full profile and keep the runs in book/recordings (DEVICE)
	$(BIN)/kvlab labs --device $(DEVICE) --profile full --record

book: labs ## run the labs and build the book; prints the path of its first page
	rm -rf book/_build
	$(BIN)/jupyter-book build . --toc book/_toc.yml --path-output book -W -n --keep-going --quiet
	@echo $(PAGE)

test: model ## run the whole test suite
	$(BIN)/python -m pytest

lint: install ## check style and the directions of imports
	$(BIN)/ruff check src tests book && $(BIN)/ruff format --check src tests book && $(BIN)/lint-imports

clean: ## remove builds and runs; the model and .venv stay
	rm -rf book/_build book/labs _runs .pytest_cache .hypothesis .ruff_cache
