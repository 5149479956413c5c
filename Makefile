# Every target works as the first command on a fresh machine: the virtual environment is made when it is missing.
#
#   PYTHON    interpreter for the environment, 3.11 or newer            make demo PYTHON=python3.12
#   PIP_ARGS  more options for pip; on Linux PyPI's torch brings CUDA (some GB), the smaller build for CPUs is had with
#             make demo PIP_ARGS='--extra-index-url https://download.pytorch.org/whl/cpu'

SHELL := /bin/bash
.DEFAULT_GOAL := help
.PHONY: help demo test test-all check docs clean

PYTHON ?= python3
PIP_ARGS ?=
MODEL := smollm2-135m-instruct
DEMO_HEAD := --draft-model $(MODEL)-eagle3 --speculative-config '{"num_speculative_tokens": 9, "tree_width": 3, "tree_beam": 1}'
DEMO_ARGS ?= --policy goodput --methods none,ngram,ngram+eagle3 $(DEMO_HEAD) --peer transformers --prompts code,story,long --prompt-tokens 1024 --time-limit 200
BIN := .venv/bin
READY := .venv/.foredraft-installed

help:
	@echo "make demo      plain against speculative decoding on $(MODEL), with the peer"
	@echo "make test      the tests (without the slow ones); make test-all runs every test"
	@echo "make check     format, lint, types, import rules"
	@echo "make docs      the command reference, docs/commands.md"
	@echo "make clean     deletes caches and build output; keeps .venv and models"

demo: $(READY) model
	@$(BIN)/foredraft bench $(MODEL) $(DEMO_ARGS)

test: $(READY) model
	@$(BIN)/python -m pytest

test-all: $(READY) model
	@$(BIN)/python -m pytest -m ""

check: $(READY)
	@$(BIN)/ruff format --check .
	@$(BIN)/ruff check .
	@$(BIN)/mypy
	@$(BIN)/lint-imports --no-logo

docs: $(READY)
	@$(BIN)/python -m typer foredraft.cli utils docs --name foredraft --title Commands --output docs/commands.md

clean:
	rm -rf build dist .pytest_cache .mypy_cache .ruff_cache .import_linter_cache .hypothesis .coverage
	find src tests -name __pycache__ -type d -prune -exec rm -rf {} +

# The weights are fetched here, with progress, rather than inside the first test that needs them.
.PHONY: model
model: $(READY)
	@$(BIN)/python -c "from foredraft.target.zoo import resolve_model; resolve_model('$(MODEL)')"

$(READY): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null || { \
	  echo "foredraft needs Python 3.11 or newer, but '$(PYTHON)' is $$($(PYTHON) --version 2>&1 | head -n 1);" \
	       "name another one: make $(MAKECMDGOALS) PYTHON=python3.12" >&2; exit 1; }
	@$(BIN)/python -m pip --version >/dev/null 2>&1 || { \
	  echo "making .venv"; \
	  $(PYTHON) -m venv .venv || { echo "on Debian and Ubuntu: apt install python3-venv" >&2; exit 1; }; }
	@echo "installing into .venv, once; torch is large, so this takes minutes"
	@set -o pipefail; $(BIN)/python -m pip install --disable-pip-version-check --progress-bar off $(PIP_ARGS) \
	  -c constraints.txt -e '.[dev]' 2> >(grep -v '^WARNING: Location .* is ignored' >&2) \
	  | { grep --line-buffered -oE '[^ /]+\.whl( \([0-9.]+ [kM]?B\))?' || true; }
	@touch $@
