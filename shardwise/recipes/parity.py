"""Compares what the trainer and a rollout engine compute with the same weights, module by module and token by token."""

import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor

from shardwise.config import (
    ConfigError,
    EmbeddedRollout,
    FrozenEngineConfig,
    GenerationConfig,
    ModelConfig,
    VllmRollout,
)
from shardwise.data import pack, render_prompt
from shardwise.engine import TrainEngine
from shardwise.ops import ModuleTrace, Place
from shardwise.recipes.build import open_model
from shardwise.recipes.rollout_engines import build_rollout
from shardwise.recipes.sync import MEAN_DIFFERENCE_BOUNDS
from shardwise.rollout import RolloutEngine
from shardwise.types import GenerateRequest, Sample

DEFAULT_PROMPTS = ["What is 12 + 30?", "Name three rivers, and the seas that they flow into."]

Phase = Literal["prefill", "decode"]
PHASES: tuple[Phase, ...] = ("prefill", "decode")
"""A whole sequence in one pass; its last tokens one after the other, from the cache of what was before."""

EngineName = Literal["embedded", "vllm"]

OTHERS = "; the rollout engine has others in place of the rest"

_TINY = 1e-30
_CACHE_BYTES = 1 << 28
"""Of vLLM: room for a few hundred tokens of any model."""


@dataclass(slots=True)
class Differences:
    """Between a trainer and a rollout engine, over all prompts so far."""

    modules: dict[Place, dict[Phase, list[Tensor]]] = field(default_factory=dict)
    """[positions of a prompt], in the trainer's order of execution: the length of the difference of the two vectors, as
    a share of the trainer's root mean square length."""
    logprobs: dict[Phase, list[Tensor]] = field(default_factory=lambda: {phase: [] for phase in PHASES})
    """[tokens of a prompt] in nats."""
    num_modules: int = 0
    """Of the trainer, that computed something."""

    def first_above(self, bound: float) -> tuple[Place, Phase] | None:
        """The first place whose mean is above the bound."""
        above = (
            (place, phase)
            for place, by_phase in self.modules.items()
            for phase in PHASES
            if phase in by_phase and _mean(by_phase[phase]) > bound
        )
        return next(above, None)


def parity(
    path: str,
    device: torch.device,
    *,
    engine: EngineName,
    dtype: str,
    prompts: Sequence[str] | None,
    max_tokens: int,
) -> bool:
    """Prints how far the two sides are apart, and the first module that differs. Runs on one rank.

    The rollout engine continues every prompt greedily, then scores prompt and completion in one pass. The trainer
    scores them too. Hooks keep what every module takes and gives.

    Args:
        path: a run's output folder (its newest checkpoint), a model folder, or a hub name.
        dtype: what both compute in. In float32 a mistake stands out by orders of magnitude.
        prompts: None for two of our own.
        max_tokens: of a completion.
    Returns:
        Whether every module and every logprob agrees within the bounds of the dtype.
    Raises:
        ConfigError: numbers out of range, or what the engine refuses. ModelError: the model cannot be loaded.
    """
    if max_tokens < 1:
        raise ConfigError(f"--max-tokens {max_tokens} is not at least 1")
    model = open_model(ModelConfig(path=path))
    tokenizer, has_template = model.tokenizer, model.tokenizer.chat_template is not None
    rendered = [
        render_prompt(tokenizer, text, apply_chat_template=has_template, system_prompt=None, origin="the prompt")
        for text in prompts or DEFAULT_PROMPTS
    ]
    num_tokens = max(map(len, rendered)) + max_tokens
    model.require_context("the prompt + --max-tokens", num_tokens)
    generation = GenerationConfig(
        engine=EmbeddedRollout() if engine == "embedded" else _traceable_vllm(num_tokens), max_concurrent_sequences=1
    )
    compute_dtype: torch.dtype = getattr(torch, dtype)
    # vLLM takes its share of the device's memory as it finds it, so it comes first.
    rollout = build_rollout(model.config, generation, dtype=compute_dtype, device=device)
    trainer = TrainEngine.build(model.folder, FrozenEngineConfig.model_validate({"param_dtype": dtype}), device=device)
    found = Differences()
    for number, prompt_ids in enumerate(rendered):
        request = GenerateRequest(
            uid=f"prompt {number}", prompt_ids=prompt_ids, max_tokens=max_tokens, temperature=0.0, num_completions=1
        )
        compare(trainer, rollout, request, found)
    rollout.close()
    bound = MEAN_DIFFERENCE_BOUNDS[dtype]
    print(
        f"{path}: trainer and {engine} rollout engine in {dtype}, {len(rendered)} prompt{'s'[: len(rendered) > 1]}",
        flush=True,
    )
    Console(file=sys.stdout).print(_table(found))
    compared = len({place.module for place in found.modules})
    print(f"modules compared: {compared} of {found.num_modules}{'' if compared == found.num_modules else OTHERS}")
    verdict = _verdict(found, bound)
    print(verdict or f"the same: all of this is within the bound of {dtype}, {bound:g} on average", flush=True)
    return verdict is None


def _traceable_vllm(num_tokens: int) -> VllmRollout:
    """For sequences of so many tokens. All of it has to be seen: no graphs, and no prompt that is remembered."""
    args = {
        "enforce_eager": True,
        "max_model_len": num_tokens + 1,  # it draws one after what it scores
        "kv_cache_memory_bytes": _CACHE_BYTES,
    }
    return VllmRollout(enable_prefix_caching=False, args=args)


def compare(trainer: TrainEngine, rollout: RolloutEngine, request: GenerateRequest, found: Differences) -> None:
    """Adds what the two sides compute of one prompt and its completion."""
    with rollout.trace() as decoding:
        ((completion,),) = rollout.generate([request])
    num_prompt = len(request.prompt_ids)
    tokens = [*request.prompt_ids, *completion.token_ids]
    with rollout.trace() as prefilling:
        (scored,) = rollout.logprobs([tokens])
    sample = Sample(uid=request.uid, token_ids=torch.tensor(tokens), loss_mask=torch.arange(len(tokens)) > 0)
    with trainer.trace() as training:
        (outputs,) = trainer.forward(pack([sample], num_shards=1, max_tokens=len(tokens)).shards[0])
    assert outputs.logprobs is not None
    expected = outputs.logprobs
    found.logprobs["prefill"].append(_apart(expected[1:], scored))
    found.logprobs["decode"].append(_apart(expected[num_prompt:], completion.logprobs))
    ours = training.of_positions(len(tokens))
    found.num_modules = len({place.module for place in ours})
    # The last token is drawn and goes through no module.
    passes: list[tuple[Phase, ModuleTrace, int, int]] = [
        ("prefill", prefilling, 0, len(tokens)),
        ("decode", decoding, num_prompt, len(tokens) - 1),
    ]
    for phase, trace, first, num_positions in passes:
        for place, values in _differences(ours, trace, num_positions):
            if first < num_positions:
                found.modules.setdefault(place, {}).setdefault(phase, []).append(values[first:])


def _differences(
    ours: Mapping[Place, Tensor], trace: ModuleTrace, num_positions: int
) -> Iterator[tuple[Place, Tensor]]:
    """[num_positions] of every place that both sides have."""
    theirs = trace.of_positions(num_positions)
    for place, values in ours.items():
        if place in theirs and theirs[place].shape[1] == values.shape[1]:
            own = values[:num_positions]
            apart = (own - theirs[place]).norm(dim=1) / own.norm(dim=1).square().mean().sqrt().clamp_min(_TINY)
            yield place, apart.nan_to_num(nan=torch.inf)


def _apart(expected: Tensor, found: Sequence[float]) -> Tensor:
    return (expected - torch.tensor(found)).abs().nan_to_num(nan=torch.inf)


def _verdict(found: Differences, bound: float) -> str | None:
    """What differs first; None for nothing."""
    first = found.first_above(bound)
    if first is not None:
        place, phase = first
        parts = found.modules[place][phase]
        module = place.module.rpartition(".")[0] if place.side == "input" else place.module
        before = list(found.modules)[: list(found.modules).index(place)]
        agreed = f"; the last place that agrees is {before[-1]}" if before else ""
        return (
            f"{module} is the first module that differs: {place}, in {phase}, by {_mean(parts):.2g} of its size on "
            f"average (bound {bound:g}), most ({_largest(parts):.2g}) at {_worst(parts, phase)}{agreed}"
        )
    for phase in PHASES:
        parts = found.logprobs[phase]
        if _mean(parts) > bound:
            return (
                f"the logprobs differ in {phase}, by {_mean(parts):.2g} nats on average (bound {bound:g}), and no "
                "module that both sides have does: look at the output projection and at what is done to logits"
            )
    return None


def _table(found: Differences) -> Table:
    table = Table("mean (largest) difference", *PHASES, box=None, pad_edge=False, header_style="")
    shown = [place for place in found.modules if place.side == "output" and _is_of_the_stream(place.module)]
    for place in shown:
        table.add_row(place.module, *(_cell(found.modules[place].get(phase)) for phase in PHASES))
    table.add_row("logprobs, in nats", *(_cell(found.logprobs[phase]) for phase in PHASES))
    return table


def _is_of_the_stream(module: str) -> bool:
    """Whether it is a layer, or lies in none."""
    parts = module.split(".")
    return not any(part.isdecimal() for part in parts[:-1])


def _cell(parts: Sequence[Tensor] | None) -> str:
    return f"{_mean(parts):.1e} ({_largest(parts):.1e})" if parts else "-"


def _mean(parts: Sequence[Tensor]) -> float:
    return float(torch.cat(list(parts)).mean())


def _largest(parts: Sequence[Tensor]) -> float:
    return float(torch.cat(list(parts)).max())


def _worst(parts: Sequence[Tensor], phase: Phase) -> str:
    prompt = max(range(len(parts)), key=lambda number: float(parts[number].max()))
    whole = "the completion of prompt" if phase == "decode" else "prompt"
    return f"token {int(parts[prompt].argmax())} of {whole} {prompt}"
