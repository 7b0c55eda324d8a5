"""Compares what the trainer and a rollout engine compute with the same weights, module by module and token by token."""

import sys
from collections.abc import Mapping, Sequence
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
    ModelConfig,
    SamplingConfig,
    VllmRollout,
)
from shardwise.config.engine import DtypeName
from shardwise.data import pack, render_prompt
from shardwise.engine import TrainEngine
from shardwise.model_config import read_model_config
from shardwise.ops import ModuleTrace, Place
from shardwise.recipes.checkpointing.checkpoints import reading
from shardwise.recipes.opened_model import OpenedModel, open_model
from shardwise.recipes.rank.rollout_engines import build_rollout
from shardwise.recipes.weight_sync import MEAN_DIFFERENCE_BOUNDS
from shardwise.rollout import RolloutEngine
from shardwise.types import GenerateRequest, Sample

DEFAULT_PROMPTS = ["What is 12 + 30?", "Name three rivers, and the seas that they flow into."]

Phase = Literal["prefill", "decode"]
PHASES: tuple[Phase, ...] = ("prefill", "decode")
"""Prefill: a whole sequence in one pass. Decode: its last tokens one by one, with the cache of those before."""
EngineName = Literal["embedded", "vllm"]

LARGEST_OF_MEAN = 10
"""Ratio of the bound of a single token to the bound of the mean."""
_TINY = 1e-30
_LEAST_CACHE_BYTES = 1 << 28
_WIDTH = 160


@dataclass(slots=True)
class Comparison:
    """Differences between the two sides in one phase, over all prompts."""

    modules: dict[Place, list[Tensor]] = field(default_factory=dict)
    """Place -> [positions] for each prompt, in the trainer's order of execution: the norm of the difference of the two
    vectors, relative to the norm of the trainer's or the median of its norms, whichever is larger."""
    logprobs: list[Tensor] = field(default_factory=list)
    """[tokens] for each prompt: differences of logprobs, in nats."""
    computed: set[str] = field(default_factory=set)
    """Names of the trainer's modules that computed something."""

    def add(self, ours: Mapping[Place, Tensor], theirs: Mapping[Place, Tensor], *, first: int) -> None:
        """Adds the differences at every place that both sides have, at the positions from `first` on."""
        self.computed |= {place.module for place in ours}
        for place, values in ours.items():
            other = theirs.get(place)
            if other is not None and first < len(other) and other.shape[1] == values.shape[1]:
                lengths = values.norm(dim=1)
                apart = (values[: len(other)] - other).norm(dim=1) / lengths.clamp_min(lengths.median() + _TINY)[
                    : len(other)
                ]
                self.modules.setdefault(place, []).append(apart[first:].nan_to_num(nan=torch.inf))

    @property
    def missing_layers(self) -> list[str]:
        """The trainer's layers that could not be compared, if the phase computed anything."""
        compared = {place.module for place in self.modules}
        return sorted(name for name in self.computed - compared if _is_layer(name)) if self.logprobs else []


@dataclass(frozen=True, slots=True)
class Bounds:
    """Bounds of the mean and the largest difference; None if rounding may send a token to another expert."""

    mean: float
    largest: float | None

    def hold(self, parts: Sequence[Tensor]) -> bool:
        """Returns whether differences are within both bounds."""
        return _mean(parts) <= self.mean and (self.largest is None or _largest(parts) <= self.largest)

    def __str__(self) -> str:
        largest = "" if self.largest is None else f" and {self.largest:g} for a token"
        return f"{self.mean:g} on average{largest}"


def parity(
    path: str,
    device: torch.device,
    *,
    engine: EngineName,
    dtype: DtypeName,
    prompts: Sequence[str] | None,
    max_tokens: int,
) -> bool:
    """Prints how far the two sides are apart, and the first module that differs. Runs on one rank.

    The rollout engine continues every prompt greedily, then scores prompt and completion in one pass. The trainer
    scores them too. Hooks keep what every module takes and gives.

    Args:
        path: a run's output folder (its newest checkpoint), a model folder, or a hub name.
        dtype: compute dtype of both sides. In float32 a mistake stands out by orders of magnitude.
        prompts: None: two of our own.
        max_tokens: longest completion.
    Returns:
        Whether all that matters agrees within the bounds of the dtype. Prompts have no images, so a vision tower is
        not compared.
    Raises:
        ConfigError: numbers are out of range, or the engine refuses something. ModelError: the model cannot be loaded.
    """
    if max_tokens < 1:
        raise ConfigError(f"--max-tokens {max_tokens} is not at least 1")
    model = open_model(ModelConfig(path=path))
    tokenizer, has_template = model.tokenizer, model.tokenizer.chat_template is not None
    rendered = [
        render_prompt(
            tokenizer,
            text,
            apply_chat_template=has_template,
            system_prompt=None,
            origin="the prompt",
            media_token_ids=model.media_token_ids,
        )
        for text in prompts or DEFAULT_PROMPTS
    ]
    num_tokens = max(map(len, rendered)) + max_tokens + (engine == "vllm")  # it samples one after those it scores
    model.context.require(f"the prompt + --max-tokens = {num_tokens}", num_tokens)
    generation = SamplingConfig(
        engine=EmbeddedRollout() if engine == "embedded" else _traceable_vllm(model, num_tokens),
        max_concurrent_sequences=1,
    )
    compute_dtype: torch.dtype = getattr(torch, dtype)
    with reading(model.folder):
        # vLLM takes its share of the device's memory as it finds it, so it comes first.
        rollout = build_rollout(model.config, generation, dtype=compute_dtype, device=device)
        trainer = TrainEngine.build(model.folder, FrozenEngineConfig(param_dtype=dtype), device=device)
    found: dict[Phase, Comparison] = {phase: Comparison() for phase in PHASES}
    try:
        for number, prompt_ids in enumerate(rendered):
            request = GenerateRequest(
                uid=f"prompt {number}", prompt_ids=prompt_ids, max_tokens=max_tokens, temperature=0.0
            )
            _compare(found, trainer, rollout, request)
    finally:
        rollout.close()
    title = f"{path}: trainer and {engine} rollout engine in {dtype}, prompts: {len(rendered)}"
    return _report(found, title, dtype, has_vision_tower=bool(model.media_token_ids))


def _traceable_vllm(model: OpenedModel, num_tokens: int) -> VllmRollout:
    """Makes the config of a vLLM engine for sequences of `num_tokens`. Every pass has to be seen by hooks: so no CUDA
    graphs, and no cached prefixes."""
    config = read_model_config(model.folder).get_text_config()
    token_bytes = 16 * config.num_hidden_layers * config.hidden_size  # keys and values in float32, times 2
    args = {
        "enforce_eager": True,
        "max_model_len": num_tokens,
        "kv_cache_memory_bytes": max(_LEAST_CACHE_BYTES, num_tokens * token_bytes),
    }
    return VllmRollout(enable_prefix_caching=False, args=args)


def _compare(
    found: Mapping[Phase, Comparison], trainer: TrainEngine, rollout: RolloutEngine, request: GenerateRequest
) -> None:
    """Adds to `found` how far the two sides are apart on one prompt and its completion."""
    with rollout.trace() as decoding:
        ((completion,),) = rollout.generate([request])
    num_prompt, num_drawn = len(request.prompt_ids), len(completion.token_ids)
    tokens = [*request.prompt_ids, *completion.token_ids]
    with rollout.trace() as prefilling:
        (scored,) = rollout.logprobs([tokens])
    sample = Sample(uid=request.uid, token_ids=torch.tensor(tokens), loss_mask=torch.arange(len(tokens)) > 0)
    with trainer.trace() as training:
        (outputs,) = trainer.forward(pack([sample], num_shards=1, max_tokens=len(tokens)).shards[0])
    assert outputs.logprobs is not None
    expected, ours = outputs.logprobs, training.of_passes([len(tokens)])
    # The last token is sampled and goes through no module.
    passes: dict[Phase, tuple[ModuleTrace, list[int], Tensor, Sequence[float]]] = {
        "prefill": (prefilling, [len(tokens)], expected[1:], scored),
        "decode": (decoding, [num_prompt] + [1] * (num_drawn - 1), expected[num_prompt:], completion.logprobs),
    }
    for phase, (trace, lengths, wanted, logprobs) in passes.items():
        found[phase].add(ours, trace.of_passes(lengths), first=num_prompt if phase == "decode" else 0)
        if phase == "prefill" or num_drawn > 1:
            apart = (wanted - torch.tensor(logprobs)).abs()
            found[phase].logprobs.append(apart.nan_to_num(nan=torch.inf))


def _report(found: Mapping[Phase, Comparison], title: str, dtype: DtypeName, *, has_vision_tower: bool) -> bool:
    """Prints the comparison. Returns whether the two sides agree."""
    first = found[PHASES[0]]
    has_experts = any("expert" in name for name in first.computed)
    mean = MEAN_DIFFERENCE_BOUNDS[dtype]
    bounds = Bounds(mean, None if has_experts and dtype != "float32" else LARGEST_OF_MEAN * mean)
    print(title, flush=True)
    Console(file=sys.stdout, width=_WIDTH).print(_table(found))
    compared = {phase: len({place.module for place in found[phase].modules}) for phase in PHASES}
    numbers = ", ".join(f"{compared[phase]} in {phase}" for phase in PHASES if found[phase].logprobs)
    print(f"modules compared: {numbers} of the trainer's {len(first.computed)}")
    if has_vision_tower:
        print("the vision tower was not compared: no prompt has an image")
    for phase in PHASES:
        if verdict := _verdict(found[phase], phase, bounds):
            print(verdict, flush=True)
            return False
    print(f"the same: within the bounds of {dtype}, {bounds}", flush=True)
    return True


def _verdict(found: Comparison, phase: Phase, bounds: Bounds) -> str | None:
    """Says what differs first; None if nothing that matters does.

    A difference that is gone again after a later layer is not in what is computed but in where: vLLM scales embeddings
    outside the module in which transformers scales them.
    """
    if missing := found.missing_layers:
        return (
            f"{len(missing)} layers could not be compared in {phase}, {missing[0]} the first: the rollout engine has "
            "no such module, or went through it otherwise than once for each token or prompt"
        )
    places = [place for place in found.modules if "rotary" not in place.module]  # rotary modules only see positions
    agree = [bounds.hold(found.modules[place]) for place in places]
    if found.logprobs and not bounds.hold(found.logprobs) and all(agree[-1:]):
        return (
            f"the logprobs differ in {phase}, by {_mean(found.logprobs):.2g} nats on average and "
            f"{_largest(found.logprobs):.2g} at most (bounds: {bounds}), and no module that both sides have does: look "
            "at the output projection and at what is done to logits"
        )
    if all(agree[-1:]):
        return None
    healed = max((n for n, is_same in enumerate(agree) if is_same and _is_of_the_stream(places[n])), default=-1)
    first = next(n for n, is_same in enumerate(agree) if not is_same and n > healed)
    place, parts = places[first], found.modules[places[first]]
    agreed = f"; the last place before it, which agrees, is {places[first - 1]}" if first else ""
    return (
        f"{_module_of(place, found.computed)} is the first module that differs: {place}, in {phase}, by "
        f"{_mean(parts):.2g} of its size on average and {_largest(parts):.2g} at {_worst(parts, phase)} (bounds: "
        f"{bounds}){agreed}"
    )


def _module_of(place: Place, computed: set[str]) -> str:
    """Returns the module that computes what is at a place: the module itself, or for an input the one around it."""
    name = place.module
    if place.side == "input":
        name = name.rpartition(".")[0]
        while name and name not in computed:
            name = name.rpartition(".")[0]
    return name or "the model"


def _table(found: Mapping[Phase, Comparison]) -> Table:
    table = Table("mean (largest) difference", *PHASES, box=None, pad_edge=False, header_style="")
    for place in found[PHASES[0]].modules:
        if _is_of_the_stream(place):
            table.add_row(place.module, *(_cell(found[phase].modules.get(place)) for phase in PHASES))
    table.add_row("logprobs, in nats", *(_cell(found[phase].logprobs) for phase in PHASES))
    return table


def _is_of_the_stream(place: Place) -> bool:
    """Returns whether it is the output of a layer, or of a module outside all layers."""
    is_outside = not any(map(str.isdecimal, place.module.split(".")))
    return place.side == "output" and (is_outside or _is_layer(place.module))


def _is_layer(module: str) -> bool:
    """Returns whether the module is an element of a module list, and in no other list."""
    *outer, last = module.split(".")
    return last.isdecimal() and not any(map(str.isdecimal, outer))


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
