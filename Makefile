# Everything runs in .venv, which is made on first use and again when pyproject.toml or constraints.txt change.
VENV ?= .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
# Two test workers on two cores: one thread each, and no spinning while a thread waits.
QUIET := OMP_NUM_THREADS=1 OMP_WAIT_POLICY=passive
# torch comes first and alone: pip then takes the build that its configuration offers (CPU or CUDA) and keeps it.
TORCH := torch==2.13.0

# Where this is set, each of some thousand processes of the tests compiles the project anew.
unexport PYTHONDONTWRITEBYTECODE

.DEFAULT_GOAL := help
.PHONY: help venv run demo adapt test test-slow test-exhaustive test-gpu gpu test-all test-sglang test-vllm test-verl test-verl-sglang test-megatron test-agents mutants bad-input lint format docs-check docs \
        environments tiny reproduce bench chaos clean

help: ## this text
	@awk -F ':.*## ' '/^[a-z%-]+:.*## / {printf "  make %-13s %s\n", $$1, $$2}' $(MAKEFILE_LIST)
	@echo 'Arguments: make run ARGS="task=gcd trainer.steps=20", make test ARGS="tests/trainer -x"'

venv: $(STAMP) ## .venv with everything that is needed, at the versions of constraints.txt

$(STAMP): pyproject.toml constraints.txt
	@test -x $(BIN)/python || { \
	  for python in $(PYTHON) python3.11 python3.12 python3.13 python3; do \
	    $$python -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null || continue; \
	    echo "$$python -m venv $(VENV)"; exec $$python -m venv $(VENV); \
	  done; \
	  echo "error: no Python of at least 3.11 found; name one with PYTHON=..." >&2; exit 1; }
	$(BIN)/pip install -q --disable-pip-version-check -c constraints.txt "$(TORCH)"
	$(BIN)/pip install -q --disable-pip-version-check -c constraints.txt -e ".[dev,docs]"
	@touch $@

run: venv ## the main job: the built-in model on chain_sum
	$(BIN)/python -m bebop.run $(ARGS)

demo: venv ## everything once in a minute: a few steps, a completion, a certificate, a planted fault
	$(BIN)/bebop demo $(ARGS)

adapt: venv ## train the MTP head of the built-in model before RL
	$(BIN)/python -m bebop.adapt $(ARGS)

test: venv ## one test of every kind of fault, three minutes on two cores; ends with processor seconds against their budget
	$(QUIET) $(BIN)/python -m pytest -m "not slow and not exhaustive and not gpu" -n 2 --dist loadfile --budget quick $(ARGS)

test-slow: venv ## real jobs, further systems, seeds and shapes; the longest files begin (tests/order.py)
	$(QUIET) $(BIN)/python -m pytest -m "slow and not exhaustive and not gpu" -n 2 --dist loadfile --no-loadscope-reorder --budget slow $(ARGS)

test-exhaustive: venv ## what .ci/run leaves out, each with its reason in its mark: see docs/testing.md
	$(QUIET) $(BIN)/python -m pytest -m "exhaustive and not gpu" -n 2 --dist loadfile --no-loadscope-reorder $(ARGS)

test-gpu: ## tests that need a CUDA device, with the python that is there: a lent machine has its own torch
	$(or $(PYTHON),python3) -m pytest -m gpu --tb=line $$(grep -rl pytest.mark.gpu tests --include='test_*.py' --exclude-dir=integration) $(ARGS)

gpu: ## everything that a GPU should tell, in seven minutes, with the python that is there; ARGS="--dry-run" without one
	$(or $(PYTHON),python3) -m bebop.bench.gpu $(ARGS)

# SGLang, vLLM, verl, Megatron and the environment libraries want versions that contradict one another: an environment each. Their pins are complete, so that
# nothing is resolved, and CUDA packages that a CPU has no use for are left out. What no test imports need not be compiled:
# that takes pip three times as long as all the rest.
LAZY := --disable-pip-version-check --no-compile
define environment
.venv-$(1)/.installed: pyproject.toml constraints-$(1).txt
	@test -x .venv-$(1)/bin/python || $(or $(PYTHON),python3.11) -m venv .venv-$(1)
	.venv-$(1)/bin/pip install -q $(LAZY) "$(TORCH)"
	.venv-$(1)/bin/pip install -q $(LAZY) --no-deps -r constraints-$(1).txt
	.venv-$(1)/bin/pip install -q $(LAZY) --no-deps --no-build-isolation -e .
	@touch $$@

endef
SUITES := megatron sglang verl vllm agents
$(foreach suite,$(SUITES),$(eval $(call environment,$(suite))))

environments: $(SUITES:%=.venv-%/.installed) ## all of these environments

test-sglang: .venv-sglang/.installed ## real SGLang on the CPU, in .venv-sglang
	$(QUIET) .venv-sglang/bin/python -m pytest tests/integration/sglang $(ARGS)

test-vllm: .venv-vllm/.installed ## real vLLM on the CPU, in .venv-vllm, with each of its model runners
	$(QUIET) .venv-vllm/bin/python -m pytest tests/integration/vllm $(ARGS)
	$(QUIET) BEBOP_VLLM_RUNNER=v2 .venv-vllm/bin/python -m pytest tests/integration/vllm $(ARGS) # Triton is interpreted there

test-verl: .venv-verl/.installed ## real verl jobs on the CPU, in .venv-verl
	$(QUIET) .venv-verl/bin/python -m pytest tests/integration/verl $(ARGS)
	$(QUIET) .venv-verl/bin/python -m pytest tests/integration/megatron/test_verl_engine.py # by itself: verl chooses its platform once

# Neither allows the other's pins. Both environments lie in the path, SGLang's before verl's.
.venv-verl-sglang/.installed: .venv-verl/.installed .venv-sglang/.installed
	$(or $(PYTHON),python3.11) -m venv --without-pip .venv-verl-sglang
	for place in .venv-verl-sglang/lib/python3*/site-packages; do \
		printf '%s\n' $(foreach one,.venv-sglang .venv-verl,../../../../$(one)/$${place#*/}) ../../../.. > $$place/both.pth; done
	@touch $@

test-verl-sglang: .venv-verl-sglang/.installed ## a real verl job with real SGLang on the CPU
	$(QUIET) .venv-verl-sglang/bin/python -m pytest tests/integration/verl/test_sglang.py $(ARGS)

test-megatron: .venv-megatron/.installed ## real megatron-core on the CPU, in .venv-megatron
	$(QUIET) .venv-megatron/bin/python -m pytest tests/integration/megatron $(ARGS)

test-agents: .venv-agents/.installed ## real OpenEnv servers and verifiers environments, in .venv-agents
	$(QUIET) .venv-agents/bin/python -m pytest tests/integration/agents $(ARGS)

smoke-%: .venv-%/.installed ## the part of it that .ci/run takes: smoke-sglang, smoke-verl, ...
	$(QUIET) .venv-$*/bin/python -m pytest $$(grep -l pytest.mark.smoke tests/integration/$*/test_*.py) -m smoke $(ARGS) # other files import the engine

test-all: test lint test-slow test-exhaustive mutants bad-input test-agents test-megatron test-sglang test-vllm test-verl test-verl-sglang ## every test that needs no GPU: some three hours on two cores

mutants: venv ## plant every fault and see that the tests notice: ten minutes; test-slow takes every sixtieth; ARGS="policy/tis --list"
	$(QUIET) $(BIN)/python -m tests.mutants $(ARGS)

bad-input: venv ## every mistake of tests/bad_input, one line each: ten minutes; test and test-slow take a third of them
	folder=$$(mktemp -d) && $(QUIET) $(BIN)/python -m tests.bad_input --out $$folder; code=$$?; rm -rf $$folder; exit $$code

chaos: venv ## two hundred faults upon real jobs, and whether anything was lost: an hour (docs/reliability.md)
	$(QUIET) $(BIN)/python -m tests.chaos $(ARGS)

lint: venv ## ruff, mypy, who may import whom (import-linter), and how long files and functions are
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/python -m tests.lint
	$(BIN)/mypy

format: venv ## repair what ruff can repair
	$(BIN)/ruff check --fix
	$(BIN)/ruff format

docs: venv ## the documentation site, into build/site; a broken link fails; ARGS="serve" shows it at 127.0.0.1:8000
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs $(or $(ARGS),build) --strict -f docs/site/mkdocs.yml

docs-check: venv ## every number in README.md, RESULTS.md and docs/ is one that is stored, and sentences are short
	$(BIN)/python -m recipes.docs --check

tiny: venv ## make the built-in model anew
	$(BIN)/python -m recipes.tiny $(ARGS)

reproduce: venv ## all recipes that reproduce the paper's findings, and RESULTS.md; hours: see there
	$(BIN)/python -m recipes.reproduce $(ARGS)

bench: venv ## decoding systems, then asynchronous against synchronous; or ARGS="rollout --batches 1"
	$(BIN)/python -m bebop.bench $(or $(ARGS),rollout)
	$(if $(ARGS),,$(BIN)/python -m bebop.bench loop)

clean: ## remove caches and build folders; runs and .venv stay
	rm -rf build dist *.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis
	find . -name __pycache__ -not -path './.venv*' -prune -exec rm -rf {} +
