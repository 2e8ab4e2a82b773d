# Two commands do everything: `make demo` and `make test`. Both install what is missing first.

VENV ?= .venv
RUN := $(VENV)/bin
# Pythons to make the environment with, the first that runs and is new enough.
PYTHONS ?= python3.11 python3.12 python3.13 python3 python
# The demo's text: a jsonl file with the key "text"; empty takes the standard library of Python.
DATA ?=
# Megatron-LM's own package, which only `make test-interop` sees.
INTEROP := build/interop
# One thread for each process of a test: two processes with two threads each fight over two cores.
PYTEST := OMP_NUM_THREADS=1 $(RUN)/python -m pytest
CODE := megatron_ds tools tests benchmarks pretrain_gpt.py setup.py

.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
.PHONY: help demo test test-interop lint unit install clean

help: ## show this list
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 14

demo: install ## make a corpus, train, resume, evaluate and generate; DATA=my.jsonl takes your text
	@$(RUN)/python tools/demo.py $(if $(DATA),--data "$(DATA)")

test: lint ## lint, then all tests (tests/unit, then damaged input, several processes, whole runs)
	$(PYTEST) -n 2 --dist loadfile tests/unit
	$(PYTEST) -n 2 --dist loadfile tests/fuzz
	$(PYTEST) tests/dist tests/e2e

test-interop: $(INTEROP)/.installed ## token files and samples against megatron-core, which it downloads
	PYTHONPATH=$(INTEROP) $(PYTEST) -m interop tests/interop

lint: install ## ruff and mypy
	$(RUN)/ruff check $(CODE)
	$(RUN)/ruff format --check $(CODE)
	$(RUN)/mypy

unit: install ## only the tests of tests/unit
	$(PYTEST) -n 2 --dist loadfile tests/unit

install: $(VENV)/.ops-built ## make the environment and build DeepSpeed's C++ ops, where missing

$(VENV)/.installed: requirements.txt setup.py
	@"$(RUN)/python" -m pip --version >/dev/null 2>&1 || { \
	  for python in $(PYTHONS); do \
	    $$python -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null || continue; \
	    echo "== Making the environment $(VENV) with $$($$python --version)"; \
	    $$python -m venv "$(VENV)" && exit 0; \
	    echo "$$python could not make an environment; on Debian: apt install python3-venv"; exit 1; \
	  done; \
	  echo "No Python 3.11 or newer among: $(PYTHONS). Name one: make PYTHONS=/path/to/python"; exit 1; }
	@echo "== Installing requirements.txt (once; minutes)"
	@"$(RUN)/python" -m pip install --disable-pip-version-check -r requirements.txt
	@"$(RUN)/python" -m pip install --disable-pip-version-check --quiet \
	  --no-deps --no-build-isolation --editable .
	@touch $@

$(VENV)/.ops-built: $(VENV)/.installed
	@"$(RUN)/python" tools/build_ops.py
	@touch $@

$(INTEROP)/.installed: tests/interop/requirements.txt $(VENV)/.installed
	rm -rf $(INTEROP)
	"$(RUN)/python" -m pip install --disable-pip-version-check --quiet --no-deps \
	  --target $(INTEROP) -r tests/interop/requirements.txt
	@touch $@

clean: ## remove caches and the demo's results; the environment stays
	rm -rf demo_run build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache
	find megatron_ds tools tests benchmarks -name __pycache__ -type d -prune -exec rm -rf {} +
