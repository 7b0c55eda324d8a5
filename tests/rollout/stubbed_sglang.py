"""SglangEngine on the stub of tests/sglang_stub, which the fixture sglang_stub puts where a server is looked for."""

import sys

import torch

from shardwise.config import SglangRollout
from shardwise.rollout import SglangEngine
from shardwise.types import GenerateRequest

GPU = torch.device("cuda", 0)
"""The stub does not look at it."""


def open_engine(folder, *, stop_token_ids=(), **keys) -> SglangEngine:
    config = SglangRollout(**{"python": sys.executable, **keys})
    return SglangEngine.from_folder(
        folder, config, dtype=torch.float32, max_rows=4, device=GPU, stop_token_ids=stop_token_ids
    )


def request(**options) -> GenerateRequest:
    return GenerateRequest(**{"uid": "a", "prompt_ids": [5, 6], "max_tokens": 4, "temperature": 1.0, **options})
