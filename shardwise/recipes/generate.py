"""Talks to a model from the command line."""

import math
import sys
from collections.abc import Iterator

import torch

from shardwise.config import ConfigError, ModelConfig
from shardwise.console import tell
from shardwise.data import render_prompt
from shardwise.engine import take_device
from shardwise.recipes.checkpointing.checkpoints import reading
from shardwise.recipes.opened_model import open_model
from shardwise.recipes.rank.library_logging import quiet_libraries
from shardwise.rollout import EmbeddedEngine
from shardwise.types import GenerateRequest

DEFAULT_TOKENS = 256
"""Default for the longest completion."""


def converse(
    path: str,
    *,
    prompts: list[str] | None,
    max_tokens: int | None,
    temperature: float,
    num_completions: int,
    apply_chat_template: bool,
    seed: int,
) -> None:
    """Prints completions of the given prompts, or of each line of standard input.

    Args:
        path: a run's output folder (its newest checkpoint), a checkpoint, a model folder, or a hub name.
        max_tokens: longest completion; None: DEFAULT_TOKENS, or what the prompt leaves of the model's context.
        apply_chat_template: falls back to the plain prompt for a tokenizer that has no template.
    """
    if max_tokens is not None and max_tokens < 1:
        raise ConfigError(f"--max-tokens={max_tokens}; a completion has at least 1, or leave it out")
    if num_completions < 1:
        raise ConfigError(f"--num-completions={num_completions}; give at least 1")
    if not 0 <= temperature < math.inf:
        raise ConfigError(f"--temperature={temperature}; give a number of at least 0, which is greedy")
    quiet_libraries()
    model = open_model(ModelConfig(path=path))
    with reading(model.folder):
        engine = EmbeddedEngine.from_folder(
            model.folder, dtype=torch.float32, max_rows=num_completions, device=take_device(0)
        )
    templated = apply_chat_template and model.tokenizer.chat_template is not None
    for prompt in prompts if prompts is not None else _lines():
        prompt_ids = render_prompt(
            model.tokenizer,
            prompt,
            apply_chat_template=templated,
            system_prompt=None,
            origin="the prompt",
            media_token_ids=model.media_token_ids,
        )
        wanted, asked = max_tokens, "--max-tokens"
        if wanted is None:
            room = DEFAULT_TOKENS if model.context.num_tokens is None else model.context.num_tokens - len(prompt_ids)
            wanted, asked = max(1, min(DEFAULT_TOKENS, room)), "the one token of a completion"
        num_tokens = len(prompt_ids) + wanted
        model.context.require(f"the prompt's {len(prompt_ids)} tokens + {asked} = {num_tokens}", num_tokens)
        request = GenerateRequest(
            uid=prompt,
            prompt_ids=prompt_ids,
            num_completions=num_completions,
            max_tokens=wanted,
            temperature=temperature,
            seed=seed,
        )
        for completion in engine.generate([request])[0]:
            print(model.tokenizer.decode(completion.token_ids, skip_special_tokens=True), flush=True)


def _lines() -> Iterator[str]:
    if sys.stdin.isatty():
        tell("one prompt a line; end with Ctrl-D")
    try:
        for line in sys.stdin:
            line.encode()  # in some locales Python reads other bytes as halves of surrogate pairs
            if line.strip():
                yield line.rstrip("\n")
    except UnicodeError:
        raise ConfigError("standard input is not UTF-8; convert it, as with iconv") from None
