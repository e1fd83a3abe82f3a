# Every target works on a fresh clone: each sets up .venv first if it has to.
PYTHON ?= python3
BIN := .venv/bin
STAMP := .venv/.installed

GPU_STAMP := .venv/.installed-gpu

.PHONY: setup compiled demo test lint bench reference gpu-check clean

setup: $(STAMP)

$(STAMP): pyproject.toml
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "kvtwin needs Python 3.11 or newer; set PYTHON=")'
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --editable '.[dev]'
	touch $@

# Tests and type checks need the real engine's packages too: torch, triton, transformers.
$(GPU_STAMP): $(STAMP)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --editable '.[dev,gpu]'
	touch $@

# The simulator's core as machine code: the same results, faster. Needs a C compiler and Python's headers.
compiled: setup
	$(BIN)/kvtwin compile

# The main job on a built-in workload: what does each allocation policy waste, and what does that cost?
demo: setup
	rm -rf results/demo
	$(BIN)/kvtwin sim -m experiment=demo hydra.sweep.dir=results/demo

test: $(GPU_STAMP)
	$(BIN)/python -m pytest -n auto

lint: $(GPU_STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

# Timings; nothing is asserted about them.
bench: setup
	$(BIN)/python -m tests.benchmarks.simulate
	$(BIN)/python -m tests.benchmarks.readers
	$(BIN)/python -m tests.benchmarks.scale

# Regenerates the committed figures and tables of results/reference.
reference: setup
	$(BIN)/python -m tests.reference

gpu-check: $(GPU_STAMP)
	$(BIN)/python -m tests.gpu_check $(TRACE)

clean:
	rm -rf .venv .pytest_cache .mypy_cache .ruff_cache .hypothesis
