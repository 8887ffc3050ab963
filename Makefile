# Needs Python 3.11 to 3.13 and make; everything else is set up in .venv by the first target that needs it.
PYTHON ?= python3
JOBS ?= 2
BIN := .venv/bin
READY := .venv/.ready

.PHONY: demo test matrix fuzz check fix lint types test-gpu test-gpu-kernels test-gpu-engine clean

demo: $(READY)
	$(BIN)/minivllm generate demo --input examples/prompts.jsonl

test: $(READY)
	$(BIN)/python -m pytest -n $(JOBS) --dist worksteal

# The whole invariance matrix, of which `test` runs a sample: hours of processor time.
matrix: $(READY)
	$(BIN)/python -m pytest -n $(JOBS) --dist worksteal tests/equivalence -m matrix

# The readers of foreign bytes, with FUZZ times the examples that `test` tries.
FUZZ ?= 200
fuzz: $(READY)
	FUZZ_TIMES=$(FUZZ) $(BIN)/python -m pytest -n $(JOBS) --dist worksteal tests/fuzz

check: lint types test

lint: $(READY)
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .

types: $(READY)
	$(BIN)/mypy

fix: $(READY)
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

# The CUDA tests, with the Python at hand (PYTHON=...): nothing is installed. Two halves, each some minutes.
test-gpu: test-gpu-kernels test-gpu-engine

test-gpu-kernels:
	PYTHONPATH=src $(PYTHON) -m pytest tests/gpu -m cuda -k "kernels or sampler or flash"

test-gpu-engine:
	PYTHONPATH=src $(PYTHON) -m pytest tests/gpu -m cuda -k "not kernels and not sampler and not flash"

clean:
	rm -rf .venv build dist .pytest_cache .mypy_cache .ruff_cache .hypothesis src/*.egg-info

$(READY): pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[test]'
	touch $@
