# Every target but gpu-test makes its own virtual environment first. `make install PYTHON=python3.12` picks another interpreter.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin

.PHONY: install quickstart test test-full test-learning gpu-test check format docs clean

install: $(VENV)/installed

# torch goes first: with it in place nothing else can pull another build of it.
$(VENV)/installed: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --constraint constraints.txt torch
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable '.[dev]'
	touch $@

quickstart: install
	$(BIN)/shardwise quickstart

test: install
	$(BIN)/python -m pytest

# Every combination of layouts and memory options, where `make test` takes every pair.
test-full: install
	$(BIN)/python -m pytest -m full

# Whether every algorithm learns, over three seeds: an hour on two cores. Writes docs/results.md.
test-learning: install
	$(BIN)/python -m benchmarks.learning

# On a machine with a GPU, in the environment it has: torch, transformers, pydantic, safetensors, pyyaml, pytest.
gpu-test:
	$(PYTHON) -m pytest tests/gpu

check: install
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy

format: install
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

docs: install
	( echo "# Configuration" ; echo ; echo "Made by \`make docs\` from the config classes." ; echo ; \
	  $(BIN)/shardwise schema --markdown ) > docs/config.md

clean:
	rm -rf $(VENV) .mypy_cache .ruff_cache .pytest_cache
