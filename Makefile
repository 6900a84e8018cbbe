# One set of verbs for people, hooks and CI. Everything installs into .venv; system packages only where missing.
SHELL := /bin/bash
.DEFAULT_GOAL := help
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
SDK := .venv-sdk
FUZZ := .venv-fuzz
FUZZ_SECONDS ?= 60
DEMO_ARGS ?=
PYTEST_ARGS ?=

# The first interpreter of a supported version.
PYTHON ?= $(shell for python in python3 python3.13 python3.12 python3.11; do \
	$$python -c 'import sys; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 13))' 2>/dev/null && { echo $$python; break; }; \
	done)

.PHONY: help setup demo test test-slow test-sdk fuzz lint types fmt bench docs clean

help: ## show the verbs
	@grep -E '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 12

setup: $(STAMP) ## install everything into .venv

$(STAMP): pyproject.toml constraints.txt
	@test -n "$(PYTHON)" || { echo "mlcd needs Python 3.11, 3.12 or 3.13, and none is on the PATH" >&2; exit 2; }
	@$(PYTHON) -c 'import ensurepip, venv' 2>/dev/null || { \
		sudo=; [ "$$(id -u)" = 0 ] || sudo=sudo; \
		$$sudo apt-get update -qq && $$sudo env DEBIAN_FRONTEND=noninteractive apt-get install -y -qq python3-venv; }
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[serve,train,dev]'
	@# An oracle of the tests, read by file: its dependencies (torchvision, timm) do not go with the CPU build of torch.
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt --no-deps open_clip_torch
	@touch $@

demo: setup ## raw images to a live service; DEMO_ARGS=--no-serve stops after the result table
	@$(BIN)/mlcd demo $(DEMO_ARGS)

test: setup ## all tests that need no GPU, no Docker and no patience
	@$(BIN)/python -m pytest -m "not gpu and not docker and not slow" $(PYTEST_ARGS)

test-slow: setup ## the tests that take minutes
	@$(BIN)/python -m pytest -m slow $(PYTEST_ARGS)

test-sdk: setup $(SDK)/.installed ## the real clients of OpenAI, Cohere, LangChain, LlamaIndex and Triton, against a server
	@$(SDK)/bin/python -m pytest -c tests/sdk/pytest.ini tests/sdk $(PYTEST_ARGS)

$(SDK)/.installed: tests/sdk/requirements.txt | setup
	@test -x $(SDK)/bin/python || $(PYTHON) -m venv $(SDK)
	@$(SDK)/bin/python -m pip install --quiet --disable-pip-version-check -r $<
	@touch $@

fuzz: setup $(FUZZ)/.installed ## the decoder and the parsers of bodies, FUZZ_SECONDS each, guided by coverage
	@for target in decoder data-uri multipart kserve json; do echo "== $$target"; \
		PYTHONPATH=$(FUZZ) $(BIN)/python tests/fuzz/fuzz.py $$target -max_total_time=$(FUZZ_SECONDS) -max_len=65536 \
			-artifact_prefix=$(FUZZ)/$$target- -print_final_stats=1 || exit 1; done

$(FUZZ)/.installed: tests/fuzz/requirements.txt | setup
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check --upgrade --target $(FUZZ) -r $<
	@touch $@

lint: setup ## style and layers
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .
	@$(BIN)/lint-imports

types: setup ## mypy, strict
	@$(BIN)/mypy

fmt: setup ## format and fix
	@$(BIN)/ruff check --fix .
	@$(BIN)/ruff format .

bench: setup ## every benchmark; each prints ratios against a peer measured in the same run
	@for script in benchmarks/*.py; do echo "== $$script"; $(BIN)/python $$script || exit 1; done

docs: setup ## build the documentation, broken links are errors
	@NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --quiet

clean: ## remove what the verbs made, the demo included
	@rm -rf $(VENV) $(SDK) $(FUZZ) demo demo.partial site .pytest_cache .mypy_cache .ruff_cache .import_linter_cache
