PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
# Small kernels on few cores: threads beyond the cores only wait for each other.
export OMP_NUM_THREADS ?= 2
export TOKENIZERS_PARALLELISM := false
export HF_HUB_OFFLINE := 1
export RAY_USAGE_STATS_ENABLED := 0

.PHONY: demo serve test lint bench proto tiny-model clean

demo: $(VENV)/installed  ## a cluster, three sessions, a kill -9, and the proof that nothing was lost
	$(BIN)/python -m cluster.demo

serve: $(VENV)/installed  ## the demo's cluster, kept running
	@echo "when it is ready, talk to it:"
	@echo "  curl http://127.0.0.1:8000/v1/chat/completions -H 'Content-Type: application/json' -H 'X-Session-ID: me' \\"
	@echo "    -d '{\"model\": \"holdfast-tiny\", \"messages\": [{\"role\": \"user\", \"content\": \"What does list.sort do?\"}]}'"
	@echo "  python:  OpenAI(base_url='http://127.0.0.1:8000/v1', api_key='none')"
	@echo "  grpcurl -plaintext -d '{\"text\": \"Return the\", \"sampling\": {\"max_tokens\": 20}}' 127.0.0.1:50051 holdfast.v1.SessionService/Generate"
	@echo "  holdfast: $(BIN)/holdfast status | sessions | audit"
	$(BIN)/holdfast serve

# Two at a time, and those on Ray one after another (tests/conftest.py): clusters mostly wait.
test: $(VENV)/installed lint  ## set up, lint, and run every test
	$(BIN)/python -m pytest --numprocesses 2 --no-loadscope-reorder

lint: $(VENV)/installed
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy

bench: $(VENV)/installed  ## figures into benchmarks/results
	$(BIN)/python -m benchmarks.kv_core
	$(BIN)/python -m benchmarks.turns
	$(BIN)/python -m benchmarks.router
	$(BIN)/python -m benchmarks.failover
	$(BIN)/python -m benchmarks.ranks
	$(BIN)/python -m benchmarks.recovery

proto: $(VENV)/installed  ## the stubs, from the .proto files
	$(BIN)/python scripts/generate_stubs.py

tiny-model: $(VENV)/installed  ## train the bundled model again, about 25 minutes on two cores
	$(BIN)/python scripts/train_tiny_model.py

$(VENV)/installed: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable ".[dev]"
	touch $@

clean:
	rm -rf $(VENV) build *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
