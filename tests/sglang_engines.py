"""The real SGLang, in the environment of the interpreter that SHARDWISE_SGLANG_PYTHON names: on a GPU, or without
one on the CPU, with what SGLang's path for CPUs lacks there (tests/cpu_sglang).
"""

import os
from pathlib import Path

import pytest
import torch

GPU = torch.device("cuda", 0)
"""Where there is none, the arguments say so to SGLang; the adapter does not look at it."""
PYTHON = os.environ.get("SHARDWISE_SGLANG_PYTHON")
needs_sglang = pytest.mark.skipif(PYTHON is None, reason="SHARDWISE_SGLANG_PYTHON names no SGLang")
_TESTS = Path(__file__).parent
_HAS_GPU = torch.accelerator.is_available()
ARGS = (
    {"attention_backend": "triton"}
    if _HAS_GPU
    else {"device": "cpu", "attention_backend": "torch_native", "max_total_tokens": 8192}
)
VARIABLES = (
    {}
    if _HAS_GPU
    else {
        "PYTHONPATH": os.pathsep.join([str(_TESTS / "cpu_sglang"), str(_TESTS / "cpu_torchvision")]),
        "SGLANG_USE_CPU_ENGINE": "1",
        "OMP_NUM_THREADS": "1",
        "TORCHDYNAMO_DISABLE": "1",  # its sampler would be compiled, for longer than a test takes
    }
)
"""Of the environment that a server is started in."""
