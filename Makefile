# Every target makes what it needs; `make demo` and `make test` work on a fresh checkout.
PYTHON ?= $(shell command -v python3.12 || echo python3)
VENV := .venv
OLDEST := .venv-oldest
CLUSTER := .venv-cluster
RAY := .venv-ray
RUN := $(VENV)/bin/python
OLDEST_JAX := 0.11.2
# Of each room that an older jax can change, the files that would show it: docs/testing.md.
OLDEST_TESTS := $(addprefix tests/,test_devices.py test_transfers.py runtime)
OLDEST_TESTS += $(addprefix tests/layers/,test_blocks.py test_sharding.py test_stack.py)
OLDEST_TESTS += $(addprefix tests/models/,test_parity.py test_tensor_parallel.py)
OLDEST_TESTS += $(addprefix tests/sampling/,test_draw.py test_sampler_state.py)
OLDEST_TESTS += $(addprefix tests/weights/,test_four_devices.py test_load.py test_orbax.py test_place.py test_quantized_files.py test_update.py)
OLDEST_TESTS += $(addprefix tests/pallas_kernels/,test_api.py test_long_cases.py test_quantized.py)
OLDEST_TESTS += $(addprefix tests/e2e/,test_parity.py test_ready.py test_kernels_in_engine.py)
# One target of each implementation; the others have the same kernels with other tiles.
OLDEST_TARGETS := h200 a100 v5e
PIP_FLAGS := --quiet --disable-pip-version-check
# CI runs the targets without `-full`, which leave out the tests marked thorough; docs/testing.md says which those are.
PYTEST := -m pytest -n 2 --dist worksteal
CI := -m 'not thorough' --hypothesis-profile quick
FAST := -m 'not slow and not thorough' --hypothesis-profile quick
ENGINE_ROOMS := $(addprefix --ignore tests/,server pallas_kernels hosts)

.PHONY: setup demo attack test test-full test-all lock audit test-fast test-oldest test-oldest-full test-kernels test-kernels-full test-server test-server-full test-cluster test-ray soak lint format bench-host bench-regression reference-env goldens sampling-goldens clean help

help:
	@echo "make demo            serve a hundred prompts three ways with the model that ships in the package"
	@echo "make test            the test suite; the server and the kernels have their own"
	@echo "make test-server     the HTTP server's: real processes, OpenAI's clients, faults, the page in a browser"
	@echo "make test-full, make test-server-full   these with what CI leaves out: dry runs, installs, each golden again"
	@echo "make test-all        every test there is, and the attacks: what runs before an issue is called resolved"
	@echo "make attack          what strangers may try, on a server of its own, while a probe must be answered"
	@echo "make lock            write anew what images install"
	@echo "make audit           look for known vulnerabilities in it, where that service can be reached"
	@echo "make soak            ten minutes of mixed load on a server: memory, pages and files must stay flat"
	@echo "make test-fast       without the tests marked slow"
	@echo "make test-oldest     on the oldest supported jax ($(OLDEST_JAX)), fast tests of what can differ there"
	@echo "make test-oldest-full    all fast tests on it but the server's"
	@echo "make test-kernels    the kernels': values in interpreters, and samples compiled for each GPU and TPU, none of which needs to be here"
	@echo "make test-kernels-full   all cases, shapes and tuning entries, more steps, samples with the oldest CUDA 13 compiler and the oldest jax"
	@echo "make test-cluster    two hosts that run one engine, copies of it behind a router, and what is lost when one of them dies"
	@echo "make test-ray        the demo model in Ray Serve, where Ray has packages"
	@echo "make lint            ruff, as CI runs it"
	@echo "make bench-host      host time per step on a device that does nothing"
	@echo "make bench-regression   counts of the engine against committed bounds, as CI runs it"
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
	$(RUN) $(PYTEST) $(CI) $(ENGINE_ROOMS)

test-full: setup
	$(RUN) $(PYTEST) $(ENGINE_ROOMS)

test-server: setup
	$(RUN) $(PYTEST) $(CI) tests/server

test-server-full: setup
	$(RUN) $(PYTEST) tests/server

attack: setup
	$(RUN) scripts/attack_server.py

test-all: lint bench-regression test-kernels-full test-full test-server-full test-oldest-full test-cluster test-ray attack

lock: setup
	$(RUN) scripts/lock.py

# Needs the service that knows of vulnerabilities.
audit:
	$(PYTHON) -m venv .venv-audit
	.venv-audit/bin/python -m pip install $(PIP_FLAGS) pip-audit
	.venv-audit/bin/pip-audit --disable-pip --require-hashes -r configs/deploy/lock-cpu.txt -r configs/deploy/lock-cuda.txt

soak: setup
	$(RUN) scripts/soak_server.py --minutes 10

test-fast: setup
	$(RUN) $(PYTEST) $(FAST)

$(OLDEST)/.ready: pyproject.toml
	$(PYTHON) -m venv $(OLDEST)
	$(OLDEST)/bin/python -m pip install $(PIP_FLAGS) --editable '.[test]' jax==$(OLDEST_JAX) jaxlib==$(OLDEST_JAX)
	touch $@

test-oldest: $(OLDEST)/.ready
	$(OLDEST)/bin/python $(PYTEST) $(FAST) $(OLDEST_TESTS)

test-oldest-full: $(OLDEST)/.ready
	$(OLDEST)/bin/python $(PYTEST) -m 'not slow' --hypothesis-profile quick --ignore tests/server

$(CLUSTER)/.ready: pyproject.toml
	$(PYTHON) -m venv $(CLUSTER)
	$(CLUSTER)/bin/python -m pip install $(PIP_FLAGS) --editable '.[test,router]'
	touch $@

# One at a time: each test has several processes.
test-cluster: $(CLUSTER)/.ready
	$(CLUSTER)/bin/python -m pytest tests/hosts tests/cluster

$(RAY)/.ready: pyproject.toml
	$(PYTHON) -m venv $(RAY)
	$(RAY)/bin/python -m pip install $(PIP_FLAGS) --editable '.[test,ray]'
	touch $@

test-ray: $(RAY)/.ready
	$(RAY)/bin/python -m pytest tests/cluster/test_ray_serve.py tests/cluster/test_ray_options.py

# The script fetches the compilers that some of the tests use.
test-kernels: setup $(OLDEST)/.ready
	$(RUN) scripts/test_kernels.py
	$(RUN) $(PYTEST) $(CI) tests/pallas_kernels
	$(OLDEST)/bin/python scripts/test_kernels.py --lower-only --targets $(OLDEST_TARGETS)

test-kernels-full: setup $(OLDEST)/.ready
	$(RUN) scripts/test_kernels.py --full
	$(RUN) $(PYTEST) tests/pallas_kernels
	$(OLDEST)/bin/python scripts/test_kernels.py

lint: setup
	$(RUN) -m ruff check
	$(RUN) -m ruff format --check

format: setup
	$(RUN) -m ruff check --fix
	$(RUN) -m ruff format

bench-host: setup
	$(RUN) scripts/bench_host.py

bench-regression: setup
	$(RUN) scripts/bench_regression.py

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
	rm -rf $(VENV) $(OLDEST) $(CLUSTER) $(RAY) .venv-reference .venv-audit .wheels .pytest_cache .ruff_cache .hypothesis
