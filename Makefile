PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
INSTALL := $(BIN)/pip install --quiet --disable-pip-version-check --constraint constraints.txt
# Small kernels on few cores: threads beyond the cores only wait for each other.
export OMP_NUM_THREADS ?= 2
export TOKENIZERS_PARALLELISM := false
export HF_HUB_OFFLINE := 1
export RAY_USAGE_STATS_ENABLED := 0

# What `check` tests: the pure core, the layers, and what needs no server.
FAST_TESTS := tests/test_layers.py tests/test_stubs.py tests/workers/kv tests/workers/test_scheduler.py \
  tests/workers/test_sampler.py tests/workers/kernels tests/router/test_text.py tests/router/test_placement.py \
  tests/cluster/test_config.py

.PHONY: demo serve check test test-long test-gpu lint bench proto tiny-model clean

demo: $(VENV)/runs  ## a cluster, three sessions, a kill -9, and the check that nothing was lost
	$(BIN)/python -m cluster.demo

serve: $(VENV)/runs  ## the demo's cluster, kept running
	@echo "when it is ready, try:"
	@echo "  curl http://127.0.0.1:8000/v1/chat/completions -H 'Content-Type: application/json' -H 'X-Session-ID: me' \\"
	@echo "    -d '{\"model\": \"holdfast-tiny\", \"messages\": [{\"role\": \"user\", \"content\": \"What does list.sort do?\"}]}'"
	@echo "  python:  OpenAI(base_url='http://127.0.0.1:8000/v1', api_key='none')"
	@echo "  $(BIN)/holdfast status | sessions | audit"
	$(BIN)/holdfast serve

check: lint  ## lint, types, the pure core and the layers: the working loop
	$(BIN)/python -m pytest $(FAST_TESTS)

# The longest test takes 150 s. One that hangs fails, with every thread's stack.
HANGS := --timeout 600 --max-worker-restart 0

# Two at a time: starting a cluster on Ray takes 12 CPU seconds.
test: lint  ## set up, lint, check types, and run every test
	$(BIN)/python -m pytest --numprocesses 2 --no-loadscope-reorder $(HANGS)

test-long: lint  ## every simulator seed, more schedules, examples and faults: hours
	$(BIN)/python -m pytest --long

# On a machine with a GPU, with its Python, whose torch is a CUDA build; needs no Ray.
GPU_TEST := PYTHONPATH=.:proto $(PYTHON) -m pytest -c tests/gpu/pytest.ini --rootdir . --confcutdir tests/gpu -n 8
GPU_KERNELS := $(wildcard tests/workers/kernels/test_triton_*.py) tests/workers/kernels/test_fp8.py
GPU_ENGINE := tests/gpu tests/parity/test_triton.py $(addprefix tests/workers/test_, engine.py overlap.py \
  speculation.py grammars.py fp8_kv.py draft_heads.py draft_model.py)

test-gpu:  ## the tests of the kernels and of the engine on this machine's GPU
	$(GPU_TEST) -p tests.gpu.kernels_plugin $(GPU_KERNELS)
	$(GPU_TEST) -p tests.gpu.engine_plugin -k "not cpu" $(GPU_ENGINE)

lint: $(VENV)/installed
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy

bench: $(VENV)/installed  ## run every benchmark; writes benchmarks/results
	$(BIN)/python -m benchmarks.kv_core
	$(BIN)/python -m benchmarks.kv_memory
	$(BIN)/python -m benchmarks.grammars
	$(BIN)/python -m benchmarks.cpu
	$(BIN)/python -m benchmarks.speculation
	$(BIN)/python -m benchmarks.turns
	$(BIN)/python -m benchmarks.router
	$(BIN)/python -m benchmarks.failover
	$(BIN)/python -m benchmarks.ranks
	$(BIN)/python -m benchmarks.step
	$(BIN)/python -m benchmarks.recovery
	$(BIN)/python -m benchmarks.kv_tiers
	$(BIN)/python -m benchmarks.kv_nodes
	$(BIN)/python -m benchmarks.kv_resume
	$(BIN)/python -m benchmarks.kv_restart
	$(BIN)/python -m benchmarks.kv_copies
	$(BIN)/python -m benchmarks.upgrade
	$(BIN)/python -m benchmarks.tls

proto: $(VENV)/installed  ## the stubs, from the .proto files
	$(BIN)/python scripts/generate_stubs.py

tiny-model: $(VENV)/installed  ## train the bundled model again, about 25 minutes on two cores
	$(BIN)/python scripts/train_tiny_model.py

$(VENV)/installed: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(INSTALL) --editable ".[dev]"
	touch $@ $(VENV)/runs

# What a cluster on CPUs needs: without the tools, and without Triton, which is larger than all the rest.
$(VENV)/runs: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(INSTALL) --editable .
	touch $@

clean:
	rm -rf $(VENV) build *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
