# make quickstart   install, prepare text, train a small MoE model, sample from it, summarise
# make test         install, run the whole test suite
# make check        lint, types, layers and file sizes
#
# PYTHON=python3.12 chooses the interpreter; RUN, DATA and STEPS change the quickstart.

PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
DATA ?= prepared/stdlib
RUN ?= runs/quickstart
RECIPE := recipes/quickstart.toml
STEPS ?=
# Threads that wait for each other should not spin: a busy neighbour then costs 7 times less.
export OMP_WAIT_POLICY ?= PASSIVE
WORKERS ?= 2
PIP := $(BIN)/python -m pip --disable-pip-version-check install --quiet --constraint constraints.txt

.PHONY: quickstart test check install clean

install: $(VENV)/.installed

$(VENV)/bin/python:
	$(PYTHON) -m venv $(VENV)
	$@ -m pip --disable-pip-version-check install --quiet --upgrade 'pip>=25.1'

$(VENV)/.installed: pyproject.toml constraints.txt | $(VENV)/bin/python
	$(PIP) --editable '.[report]'
	touch $@

$(VENV)/.test: $(VENV)/.installed
	$(PIP) --group test
	touch $@

$(VENV)/.dev: $(VENV)/.test
	$(PIP) --group dev
	touch $@

quickstart: install
	rm -rf $(RUN)
	$(BIN)/slipstream prepare stdlib --out $(DATA) --tokenizer byte
	$(BIN)/slipstream train $(RECIPE) data.path=$(DATA) $(if $(STEPS),train.steps=$(STEPS)) --run-dir $(RUN)
	$(BIN)/slipstream sample $(RUN) --prompt "$$(printf 'import os\nimport sys\n\n\ndef ')" --tokens 300
	$(BIN)/slipstream report $(RUN)

test: $(VENV)/.test
	$(BIN)/python -m pytest -n $(WORKERS)

check: $(VENV)/.dev
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/pyrefly check --python-interpreter-path $(BIN)/python
	$(BIN)/lint-imports
	$(BIN)/python tools/check_sizes.py

clean:
	rm -rf $(VENV) runs prepared
