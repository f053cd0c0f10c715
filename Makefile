# Every target makes what it needs; `make demo` and `make test` work on a fresh checkout.
PYTHON ?= $(shell command -v python3.12 || echo python3)
VENV := .venv
OLDEST := .venv-oldest
RUN := $(VENV)/bin/python
OLDEST_JAX := 0.11.2
PIP_FLAGS := --quiet --disable-pip-version-check

.PHONY: setup demo test test-fast test-oldest test-kernels test-kernels-full test-server soak lint format bench-host reference-env goldens sampling-goldens clean help

help:
	@echo "make demo            serve a hundred prompts three ways with the model that ships in the package"
	@echo "make test            the test suite; the server and the kernels have their own"
	@echo "make test-server     the HTTP server's: real processes, OpenAI's clients, faults, the page in a browser"
	@echo "make soak            ten minutes of mixed load on a server: memory, pages and files must stay flat"
	@echo "make test-fast       without the tests marked slow"
	@echo "make test-oldest     the fast tests on the oldest supported jax ($(OLDEST_JAX))"
	@echo "make test-kernels    the kernels': values in interpreters, and every one compiled for its GPU or TPU, none of which needs to be here"
	@echo "make test-kernels-full   the same with every tuning entry and all layers, on the oldest jax too"
	@echo "make lint            ruff, as CI runs it"
	@echo "make bench-host      host time per step on a device that does nothing"
	@echo "make reference-env   the separate environment (Python 3.11, torch, transformers) that makes goldens"
	@echo "make goldens         build the parity goldens anew in it"
	@echo "make sampling-goldens   and what its logits processors make of random logits"

setup: $(VENV)/.ready

$(VENV)/.ready: pyproject.toml
	$(PYTHON) -c 'import sys; sys.exit("Python 3.12 or newer is needed; set PYTHON=/path/to/python3.12") if sys.version_info < (3, 12) else None'
	$(PYTHON) -m venv $(VENV)
	$(RUN) -m pip install $(PIP_FLAGS) --editable '.[test]'
	touch $@

demo: setup
	$(RUN) scripts/demo.py

test: setup
	$(RUN) -m pytest -n 2 --dist worksteal --ignore tests/server --ignore tests/pallas_kernels

test-server: setup
	$(RUN) -m pytest -n 2 --dist worksteal tests/server

soak: setup
	$(RUN) scripts/soak_server.py --minutes 10

test-fast: setup
	$(RUN) -m pytest -n 2 --dist worksteal -m 'not slow'

$(OLDEST)/.ready: pyproject.toml
	$(PYTHON) -m venv $(OLDEST)
	$(OLDEST)/bin/python -m pip install $(PIP_FLAGS) --editable '.[test]' jax==$(OLDEST_JAX) jaxlib==$(OLDEST_JAX)
	touch $@

test-oldest: $(OLDEST)/.ready
	$(OLDEST)/bin/python -m pytest -n 2 --dist worksteal -m 'not slow' --ignore tests/server

# The script fetches the compilers that some of the tests use.
test-kernels: setup $(OLDEST)/.ready
	$(RUN) scripts/test_kernels.py
	$(RUN) -m pytest -n 2 --dist worksteal tests/pallas_kernels
	$(OLDEST)/bin/python scripts/test_kernels.py --lower-only

test-kernels-full: setup $(OLDEST)/.ready
	$(RUN) scripts/test_kernels.py --full
	$(OLDEST)/bin/python scripts/test_kernels.py --full

lint: setup
	$(RUN) -m ruff check
	$(RUN) -m ruff format --check

format: setup
	$(RUN) -m ruff check --fix
	$(RUN) -m ruff format

bench-host: setup
	$(RUN) scripts/bench_host.py

reference-env: .venv-reference/.ready

.venv-reference/.ready: scripts/reference_requirements.txt
	python3.11 -m venv .venv-reference
	.venv-reference/bin/pip install $(PIP_FLAGS) torch==2.13.0
	.venv-reference/bin/pip install $(PIP_FLAGS) -r scripts/reference_requirements.txt
	touch $@

goldens: reference-env
	.venv-reference/bin/python scripts/make_reference_goldens.py

sampling-goldens: reference-env
	.venv-reference/bin/python scripts/make_sampling_goldens.py

clean:
	rm -rf $(VENV) $(OLDEST) .venv-reference .wheels .pytest_cache .ruff_cache .hypothesis
