# `make demo`, `make quick` and `make test` install what is missing first.

VENV ?= .venv
RUN := $(VENV)/bin
# Python compiles what is imported; compiling all that is installed would take a minute more.
PIP = "$(RUN)/python" -m pip install --disable-pip-version-check --no-compile
# Interpreters for the environment; the first one that runs and is new enough is used.
PYTHONS ?= python3.11 python3.12 python3.13 python3.14 python3 python
# What the demo imports.
DEMO_PACKAGES := deepspeed matplotlib ninja numpy orjson PyYAML regex rich safetensors setuptools \
  tokenizers torch xxhash
# The demo's text: a jsonl file with the key "text". If empty, the standard library of Python.
DATA ?=
# Megatron-LM's own package, which only `make test-interop` uses.
INTEROP := build/interop
# Other trainers, whose older versions of shared packages only `make test-interop` uses.
TRAINERS := build/trainers
# An S3 server and fsspec's client for it, which only tests use. They need older versions of some
# packages than requirements.txt has, so they have a folder of their own.
S3 := build/s3
# Ray, which is large and only tests/cluster uses.
RAY := build/ray
# torch's build for CUDA and the compilers that it brings, 4.5 GB, which only tests/lowering uses.
CUDA := build/lowering
# Schemas and a linter for the recipes of examples/clusters.
RECIPES := build/recipes
# What the tests need besides the product.
TESTED = $(VENV)/.dev-installed $(VENV)/.ops-built $(S3)/.installed
# What tests/cluster needs besides, of Debian.
CLUSTER_PACKAGES := iproute2 openmpi-bin openssh-client openssh-server pdsh slurm-client slurmctld slurmd
AS_ROOT = $(shell [ "$$(id -u)" = 0 ] || ! sudo -n true 2>/dev/null || echo sudo -n)
# One thread per process: two processes with two threads each would compete for two cores.
PYTEST := OMP_NUM_THREADS=1 $(RUN)/python -m pytest
# Files run in workers, each with its own fork server; fixtures of a file are built once.
PARALLEL := $(PYTEST) -n 2 --dist loadfile --no-loadscope-reorder
# Tests of several processes wait for each other, for disks and for time limits.
PROCESSES := $(PYTEST) -n 3 --dist loadfile --no-loadscope-reorder
CODE := megatron_ds tools tasks tests benchmarks examples pretrain_gpt.py setup.py

# Pages that programs write: their words do not count, nor those between `begin:` and `end`.
WRITTEN_PAGES := docs/reference/|/verified.md|/proofs.md|_versions.md|/engines.md
COMMIT ?= HEAD

# The tests start hundreds of processes; without bytecode caches each would compile its modules.
unexport PYTHONDONTWRITEBYTECODE

.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
.PHONY: help demo quick test proofs test-libaio test-deepspeed test-versions test-gpu test-interop \
  test-commands cluster-packages test-cluster mutants lint unit install hashes ops words clean

help: ## show this list
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 14

# The rest of requirements.txt, such as transformers and pyarrow, comes with `make install`.
demo: $(if $(wildcard $(VENV)/.installed),install,$(VENV)/.demo-installed) ## make a corpus, train, resume, evaluate and generate; DATA=my.jsonl uses your text
	@$(RUN)/python tools/demo.py $(if $(DATA),--data "$(DATA)")

quick: lint $(TESTED) ## lint, unit tests and one case of each proof, in about three minutes
	$(PARALLEL) tests/unit
	$(PARALLEL) -m smoke tests/dist tests/e2e

test: lint $(TESTED) ## lint, then unit, fuzz, multi-process and end-to-end tests: every claim once
	$(PARALLEL) tests/unit tests/fuzz
	$(PROCESSES) tests/dist tests/e2e

# What the chosen sections need; each engine of the section "engines" is installed when it runs.
PROVEN = $(if $(filter interop,$(or $(ONLY),interop)),$(INTEROP)/.installed $(TRAINERS)/.installed) \
  $(if $(filter cluster,$(or $(ONLY),cluster)),$(RAY)/.installed $(RECIPES)/.installed)
# Sections in which nothing is offloaded to NVMe.
WITHOUT_OFFLOAD := engines interop museum lowering

proofs: lint $(TESTED) $(PROVEN) ## everything that proves something, more than an hour; ONLY="layouts mutants" selects sections
	@$(if $(filter-out $(WITHOUT_OFFLOAD),$(or $(ONLY),all)),$(RUN)/python tools/build_ops.py aio || echo "The proofs that offload to NVMe will be skipped")
	@$(if $(filter lowering,$(or $(ONLY),lowering)),$(MAKE) $(CUDA)/.installed || echo "The proofs that compile for a device will be skipped")
	$(RUN)/python tests/proofs/run.py $(ONLY)

test-libaio: $(TESTED) ## the tests that offload to NVMe, which need libaio and its headers
	@$(RUN)/python tools/build_ops.py aio
	$(PARALLEL) -m 'libaio and not proof' tests/dist tests/e2e tests/unit  # pytest enters no folder "dist" by itself

test-gpu: $(VENV)/.dev-installed ## the tests that need an accelerator, on the one that DeepSpeed finds
	$(RUN)/python -m pytest -m gpu tests

test-interop: $(INTEROP)/.installed $(TRAINERS)/.installed ## compare with megatron-core, torchtitan, OLMo-core and llama.cpp, which it downloads
	PYTHONPATH=$(INTEROP) $(PYTEST) -m interop tests/interop

test-commands: $(TESTED) ## the commands of the README, the tutorial and other pages, in a fresh clone
	$(PYTEST) -n 2 tests/commands

cluster-packages: ## install what test-cluster needs; Debian, as root or with sudo
	$(AS_ROOT) apt-get update
	$(AS_ROOT) env DEBIAN_FRONTEND=noninteractive apt-get install -y --no-install-recommends $(CLUSTER_PACKAGES)

test-cluster: $(VENV)/.dev-installed $(RAY)/.installed $(RECIPES)/.installed ## runs on two nodes, which are namespaces of this machine; as root or with sudo
	$(AS_ROOT) env $(PARALLEL) tests/cluster

test-deepspeed: $(VENV)/.dev-installed ## run the proofs with VERSIONS="0.19.8 ..." of DeepSpeed; writes docs/development/deepspeed_versions.md
	$(RUN)/python tests/versions/run.py $(VERSIONS)

test-versions: $(VENV)/.dev-installed ## run commands and tests with VERSIONS="lowest newest torch==2.14.1 ..." of other packages; writes docs/development/package_versions.md
	$(RUN)/python tests/versions/bounds.py $(VERSIONS)

mutants: $(TESTED) ## score the tests by small mistakes in the code; ONLY="model/*" selects, JOBS=2 workers
	$(RUN)/python tests/mutants/run.py --jobs $(or $(JOBS),2) $(foreach pattern,$(ONLY),'$(pattern)')

lint: $(VENV)/.dev-installed ## ruff and mypy
	$(RUN)/ruff check $(CODE)
	$(RUN)/ruff format --check $(CODE)
	$(RUN)/mypy --num-workers 2 || { [ $$? = 2 ] && $(RUN)/mypy; }  # 2: a worker did not start in 3 seconds

unit: $(TESTED) ## only the unit tests
	$(PARALLEL) tests/unit

install: $(VENV)/.installed ## create the environment, if missing

hashes: install ## write requirements-hashes.txt again, after a change of requirements.txt
	$(RUN)/python tests/write_hashes.py

ops: install ## build DeepSpeed's C++ ops, which runs with offload otherwise build when they start
	@$(RUN)/python tools/build_ops.py

$(VENV)/.created:
	@"$(RUN)/python" -m pip --version >/dev/null 2>&1 || { \
	  for python in $(PYTHONS); do \
	    $$python -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null || continue; \
	    echo "== Creating the environment $(VENV) with $$($$python --version)"; \
	    $$python -m venv "$(VENV)" && exit 0; \
	    echo "$$python could not create an environment; on Debian: apt install python3-venv"; exit 1; \
	  done; \
	  echo "No Python 3.11 or newer among: $(PYTHONS). Name one: make PYTHONS=/path/to/python"; exit 1; }
	@touch $@

$(VENV)/.demo-installed: requirements.txt | $(VENV)/.created
	@echo "== Installing what the demo needs of requirements.txt (once, about a minute)"
	@$(PIP) --constraint requirements.txt $(DEMO_PACKAGES)
	@touch $@

$(VENV)/.installed: requirements.txt setup.py | $(VENV)/.created
	@echo "== Installing requirements.txt (once, about a minute)"
	@$(PIP) -r requirements.txt
	@$(PIP) --quiet --no-deps --no-build-isolation --editable .
	@touch $@

$(VENV)/.dev-installed: requirements-dev.txt $(VENV)/.installed
	@echo "== Installing requirements-dev.txt (once)"
	@$(PIP) -r requirements-dev.txt
	@touch $@

$(VENV)/.ops-built: $(VENV)/.installed
	@"$(RUN)/python" tools/build_ops.py
	@touch $@

$(INTEROP)/.installed: tests/interop/requirements.txt tests/interop/engines.txt $(VENV)/.installed
	rm -rf $(INTEROP)
	$(PIP) --quiet --no-deps --target $(INTEROP) -r tests/interop/requirements.txt
	$(PIP) --quiet --no-deps --only-binary :all: --target $(INTEROP) -r tests/interop/engines.txt \
		|| echo "no wheel of tests/interop/engines.txt for this machine: its tests are skipped"
	@touch $@

$(TRAINERS)/.installed: tests/interop/trainers.txt $(VENV)/.installed
	rm -rf $(TRAINERS)
	$(PIP) --quiet --no-deps --target $(TRAINERS) -r tests/interop/trainers.txt
	@touch $@

$(RAY)/.installed: tests/ray/requirements.txt $(VENV)/.installed
	rm -rf $(RAY)
	$(PIP) --quiet --no-deps --target $(RAY) -r tests/ray/requirements.txt
	@touch $@

$(CUDA)/.installed: tests/lowering/requirements.txt $(VENV)/.installed
	rm -rf $(CUDA)
	$(PIP) --quiet --target $(CUDA) -r tests/lowering/requirements.txt
	@touch $@

$(RECIPES)/.installed: tests/cluster/requirements.txt $(VENV)/.installed
	rm -rf $(RECIPES)
	$(PIP) --quiet --no-deps --target $(RECIPES) -r tests/cluster/requirements.txt
	@touch $@

$(S3)/.installed: tests/s3/requirements.txt $(VENV)/.installed
	rm -rf $(S3)
	$(PIP) --quiet --no-deps --target $(S3) -r tests/s3/requirements.txt
	@touch $@

words: ## count the words of README.md and docs/ that are written by hand, of COMMIT=HEAD
	@for page in $$(git ls-tree -r --name-only $(COMMIT) README.md docs | grep '\.md$$' | \
	  grep -vE '$(WRITTEN_PAGES)'); do \
	  git show $(COMMIT):$$page | sed '/<!-- begin: /,/<!-- end/d; /<!-- what follows/,$$d'; \
	done | wc -w

clean: ## remove caches and the demo's results; keep the environment
	rm -rf demo_run build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache
	find megatron_ds tools tests benchmarks -name __pycache__ -type d -prune -exec rm -rf {} +
