# alignattn: one command each. `make` lists them. Arguments go through ARGS: make test ARGS="-k sinkhorn -x"

PYTHON  ?= python3
VENV    := .venv
BIN     := $(VENV)/bin
STAMP   := $(VENV)/.installed
PIP     := $(BIN)/python -m pip --disable-pip-version-check --no-input
SOURCES := src $(wildcard tests) $(wildcard tools)
ARGS    ?=

# Some CPUs advertise AMX and cannot run it: there bf16 products end the process with an illegal instruction. oneDNN
# keeps off AMX with this. It belongs to the environment: the package never sets it.
export ONEDNN_MAX_CPU_ISA ?= AVX512_CORE_BF16
# Silences the tokenizers' warning about forked workers.
export TOKENIZERS_PARALLELISM := false

.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
.PHONY: help setup test demo lint format fuzz docs tables models wheel-check clean

help: ## list the commands
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "make %-12s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

setup: $(STAMP) ## make .venv with everything that development needs

$(BIN)/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { \
	  echo "alignattn needs Python 3.11 or newer; '$(PYTHON)' is $$($(PYTHON) --version 2>&1 || true)." >&2; \
	  echo "Name another one: make PYTHON=/path/to/python3.12 ..." >&2; exit 1; }
	@$(PYTHON) -c 'import ensurepip' 2>/dev/null || { \
	  echo "'$(PYTHON)' cannot make environments: install its venv module (Debian, Ubuntu: python3-venv)." >&2; exit 1; }
	$(PYTHON) -m venv $(VENV)

# torch first and alone, at the version of constraints.txt: asked for more loosely it may come as gigabytes of CUDA.
$(STAMP): pyproject.toml constraints.txt | $(BIN)/python
	$(PIP) install --quiet -c constraints.txt torch
	$(PIP) install --quiet -c constraints.txt -e '.[dev]'
	@touch $@

# One thread a worker: xdist already fills the cores.
test: $(STAMP) ## run all tests on all cores
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n logical --maxprocesses 8 --dist worksteal $(ARGS)

demo: $(STAMP) ## run the demo
	$(BIN)/alignattn demo $(ARGS)

lint: $(STAMP) ## check style, format and types
	$(BIN)/ruff check $(SOURCES)
	$(BIN)/ruff format --check $(SOURCES)
	$(BIN)/mypy

format: $(STAMP) ## format, and repair what can be repaired
	$(BIN)/ruff check --fix $(SOURCES)
	$(BIN)/ruff format $(SOURCES)

fuzz: $(STAMP) ## run the property tests with 10,000 examples each
	ALIGNATTN_EXAMPLES=10000 OMP_NUM_THREADS=1 $(BIN)/python -m pytest \
	  -n logical --maxprocesses 8 tests/test_properties.py $(ARGS)

docs: $(STAMP) ## write docs/options.md and docs/recipes.md anew from the code
	$(BIN)/python tools/option_table.py
	$(BIN)/python tools/recipe_table.py

tables: $(STAMP) ## write the results, performance and report pages, the figures and the README's table from results/
	$(BIN)/python tools/result_tables.py
	$(BIN)/python tools/figures.py
	$(BIN)/python tools/performance_page.py
	$(BIN)/python tools/report_page.py

models: $(STAMP) ## write docs/models.md, the table of transformers families
	$(BIN)/python tools/model_table.py $(ARGS)

# What a user gets: the wheel, its core dependencies, no extra, no source tree in sight.
wheel-check: $(STAMP) ## build a wheel, install it in a clean environment, import it
	@set -eu; work=$$(mktemp -d); trap 'rm -rf "$$work"' EXIT; \
	$(BIN)/python -m build --wheel --no-isolation --outdir "$$work" . > "$$work/log" 2>&1 || { cat "$$work/log" >&2; exit 1; }; \
	$(BIN)/python -m venv "$$work/venv"; \
	pip="$$work/venv/bin/python -m pip --disable-pip-version-check --no-input install --quiet -c constraints.txt"; \
	$$pip torch; $$pip "$$work"/*.whl; \
	"$$work/venv/bin/python" -I tools/wheel_check.py; \
	"$$work/venv/bin/alignattn" --help > /dev/null; \
	echo "wheel-check: $$(basename "$$work"/*.whl) installs and imports without extras"

clean: ## remove .venv, builds and caches
	rm -rf $(VENV) dist build .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find src tests tools -name __pycache__ -type d -prune -exec rm -rf {} + 2>/dev/null || true
