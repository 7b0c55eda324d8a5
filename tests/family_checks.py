"""What can be proven of a model family, check by check, on one gloo rank and on two, against plain transformers."""

import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from family_table import FAMILIES, REFUSED, save_model
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoModel, AutoModelForCausalLM, AutoModelForImageTextToText

from shardwise.config import ConfigError, EngineConfig, LoraConfig, ModelError, OptimizerConfig
from shardwise.data.packing import pack, unpack
from shardwise.data.synthetic import train_tokenizer
from shardwise.engine import TrainEngine
from shardwise.engine.heads import value_projection_name
from shardwise.engine.lora import fused_experts
from shardwise.engine.model import build_on_meta
from shardwise.engine.model_classes import AUTO_CLASSES
from shardwise.families import PROVEN, backbone, language_model_class
from shardwise.model_config import media_token_ids
from shardwise.ops import plain_name
from shardwise.rollout import EmbeddedEngine
from shardwise.types import Completion, GenerateRequest, Sample

CPU = torch.device("cpu")
LENGTHS = (9, 5, 13, 5)
MAX_TOKENS = 6
"""Of a completion."""
OPTIMIZER = OptimizerConfig(learning_rate=1e-2, adam_eps=1e-3)
"""An epsilon that keeps Adam from turning the rounding of gradients near 0 into whole steps."""


@dataclass(frozen=True)
class Refusal:
    """Why the package would not do it."""

    reason: str


def sequences(lengths: tuple[int, ...] = LENGTHS) -> list[Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randint(3, 97, (length,), generator=generator) for length in lengths]


@torch.no_grad()
def eager_logprobs(model, tokens: Tensor) -> Tensor:
    """[L - 1]: of every token but the first, its sequence alone."""
    logprobs = model(input_ids=tokens[None], use_cache=False).logits[0].log_softmax(dim=-1)
    return logprobs[:-1].gather(1, tokens[1:, None])[:, 0]


def require_logprobs_of(model, request: GenerateRequest, completion: Completion, *, atol: float) -> None:
    """A completion's logprobs are those that transformers gives its tokens, read from the prompt's beginning."""
    prompt = torch.tensor(request.prompt_ids + request.partial_token_ids)
    whole = torch.cat([prompt, torch.tensor(completion.token_ids)])
    expected = eager_logprobs(model, whole)[len(prompt) - 1 :]
    torch.testing.assert_close(torch.tensor(completion.logprobs), expected, atol=atol, rtol=0)


def packed(tokens: list[Tensor], num_shards: int = 1):
    """All sequences in one pack on every rank that computes others."""
    samples = [Sample(uid=str(i), token_ids=t, loss_mask=torch.arange(len(t)) > 0) for i, t in enumerate(tokens)]
    return pack(samples, num_shards=num_shards, max_tokens=128)


def build(folder: Path, head="logprobs", **keys) -> TrainEngine:
    config = EngineConfig(allow_unproven=True, **keys)
    return TrainEngine.build(Path(folder), config, device=CPU, optimizer=OPTIMIZER, head=head)


def outputs(engine: TrainEngine, num_sharing: int = 1, **options) -> list[Tensor]:
    """[L] of every sequence: logprobs or values."""
    step = packed(sequences(), dist.get_world_size() // num_sharing)
    own = [
        out.logprobs if out.values is None else out.values
        for out in engine.forward(step.shards[dist.get_rank() // num_sharing], **options)
    ]
    shards: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(shards, own)
    return unpack(step, shards[::num_sharing])


def loss(found, batch, denominators):
    values = found.logprobs if found.values is None else found.values
    return -values[batch.loss_mask].sum() / denominators.num_tokens, {}


def accumulate(engine: TrainEngine, num_sharing: int = 1) -> None:
    step = packed(sequences(), dist.get_world_size() // num_sharing)
    engine.forward_backward(step.shards[dist.get_rank() // num_sharing], loss, step.denominators)


def trained(folder: str, **keys) -> tuple[list[Tensor], dict[str, Tensor], dict[str, Tensor]]:
    """Logprobs of every sequence, gradients, and the weights after a step."""
    num_sharing = keys.get("ulysses_size", 1)
    engine = build(Path(folder), **keys)
    logprobs = outputs(engine, num_sharing)
    accumulate(engine, num_sharing)
    gradients = gradients_of(engine)
    engine.optim_step()
    return logprobs, gradients, {name: tensor.clone() for name, tensor in engine.named_weights(torch.float32)}


def gradients_of(engine: TrainEngine) -> dict[str, Tensor]:
    """Whole, by the names of the parameters."""
    named = {plain_name(name): parameter for name, parameter in engine._model.hf_model.named_parameters()}
    return {name: p.grad.full_tensor().clone() for name, p in named.items() if p.grad is not None}


def recomputed(folder: str, **keys) -> dict[str, Tensor]:
    """Gradients where layers are computed again in the backward pass."""
    engine = build(Path(folder), **keys)
    accumulate(engine)
    return gradients_of(engine)


def adapted(folder: str, out: str, **lora) -> tuple[list[Tensor], list[Tensor]]:
    """Logprobs with an adapter that took a step, and without it; writes the adapter and the merged model."""
    engine = adapted_engine(folder, out, **lora)
    return outputs(engine), outputs(engine, with_adapters=False)


def adapted_engine(folder: str, out: str, **lora) -> TrainEngine:
    engine = build(Path(folder), lora=LoraConfig(rank=4, **lora))
    accumulate(engine)
    engine.optim_step()
    engine.export_adapter(Path(out), folder)
    engine.export_hf(Path(f"{out}_merged"), tokenizer())
    return engine


def adapted_experts(folder: str, out: str) -> tuple[list[Tensor], list[Tensor], dict[str, Tensor]]:
    """The same with all fused experts adapted too, and the gradients of the next step: of the first one, those of A
    are 0."""
    model = build_on_meta(Path(folder))
    names = fused_experts(model)
    if not names:
        raise ConfigError(f"{type(model).__name__} {NO_EXPERTS}")
    engine = adapted_engine(folder, out, target_parameters=names)
    on, off = outputs(engine), outputs(engine, with_adapters=False)
    accumulate(engine)
    return on, off, gradients_of(engine)


def quantised(folder: str, out: str) -> tuple[list[Tensor], list[Tensor]]:
    """Logprobs with an adapter on a base in 4 bits, and without it; writes the merged model."""
    engine = build(Path(folder), lora=LoraConfig(rank=4, quantize_base="nf4"))
    accumulate(engine)
    engine.optim_step()
    engine.export_hf(Path(out), tokenizer())
    return outputs(engine), outputs(engine, with_adapters=False)


@dataclass(frozen=True)
class HeadedValues:
    new: list[Tensor]
    """Of a head on the language model."""
    new_weight: Tensor
    """Of that head."""
    saved: list[Tensor]
    trained: list[Tensor]
    """Of the saved head, after a step: of what is written."""


def headed(folder: str, head: str, out: str, language_model: str) -> HeadedValues:
    started = build(Path(language_model), head)
    new = outputs(started)
    weights = {name: tensor.clone() for name, tensor in started.named_weights(torch.float32)}
    new_weight = weights[f"{value_projection_name(started._model.hf_model)}.weight"]
    engine = build(Path(folder), head)
    before = outputs(engine)
    accumulate(engine)
    engine.optim_step()
    engine.export_hf(Path(out), tokenizer())
    return HeadedValues(new, new_weight, before, outputs(engine))


def exported(folder: str, out: str) -> None:
    build(Path(folder)).export_hf(Path(out), tokenizer())


def generated(folder: str) -> list[tuple[list[int], list[float], list[float]]]:
    """Of each prompt greedily and at random: tokens, their logprobs, and those that the trainer gives them."""
    rollout = EmbeddedEngine.from_folder(Path(folder), dtype=torch.float32, max_rows=3, device=CPU, allow_unproven=True)
    requests = [
        GenerateRequest(uid=f"{i} {t}", prompt_ids=prompt.tolist(), max_tokens=MAX_TOKENS, temperature=t)
        for t in (0.0, 1.0)
        for i, prompt in enumerate(sequences())
    ]
    completions = [group[0] for group in rollout.generate(requests)]
    wholes = [
        torch.tensor(request.prompt_ids + found.token_ids) for request, found in zip(requests, completions, strict=True)
    ]
    step = packed(wholes)
    engine = build(Path(folder))
    scored = unpack(step, [[out.logprobs for out in engine.forward(step.shards[0])]])
    return [
        (found.token_ids, found.logprobs, logprobs[len(request.prompt_ids) :].tolist())
        for request, found, logprobs in zip(requests, completions, scored, strict=True)
    ]


NO_EXPERTS = "has no experts"
"""Whatever the class is called."""


def tokenizer():
    return train_tokenizer(["2+3=5"], vocab_size=261)


def attempt(function: Callable[..., Any], folder: str, *arguments: Any, **keys: Any) -> Any:
    """What it gives, or a Refusal."""
    try:
        return function(folder, *arguments, **keys)
    except (ModelError, ConfigError) as error:
        reason = str(error).removeprefix(f"{folder}: ")
        return Refusal(NO_EXPERTS if NO_EXPERTS in reason else reason)


def on_one_rank(folders: dict[str, str], out: str) -> dict[str, Any]:
    packing = attempt(trained, folders["logprobs"])
    if isinstance(packing, Refusal):
        return {"packing": packing}
    found = {
        "packing": packing,
        "lora": attempt(adapted, folders["logprobs"], f"{out}/lora"),
        "qlora": attempt(quantised, folders["logprobs"], f"{out}/qlora"),
        "embedded": attempt(generated, folders["logprobs"]),
    }
    for check, kind in RECOMPUTED.items():
        found[check] = attempt(recomputed, folders["logprobs"], activation_checkpointing=kind)
    for head in AUTO_CLASSES:
        found[head] = attempt(headed, folders[head], head, f"{out}/{head}", folders["logprobs"])
    return found


def alone(folders: dict[str, str], out: str) -> dict[str, Any]:
    """On one rank, what two ranks are held against."""
    return {
        "step": attempt(trained, folders["logprobs"]),
        "lora_experts": attempt(adapted_experts, folders["logprobs"], f"{out}/lora_experts_alone"),
    }


def on_two_ranks(folders: dict[str, str], out: str) -> dict[str, Any]:
    return {
        "fsdp2": attempt(trained, folders["logprobs"]),
        "ulysses": attempt(trained, folders["logprobs"], ulysses_size=2),
        "expert_parallel": attempt(trained, folders["logprobs"], ep_size=2),
        "lora_experts": attempt(adapted_experts, folders["logprobs"], f"{out}/lora_experts"),
        "export": attempt(exported, folders["logprobs"], f"{out}/export"),
    }


RECOMPUTED = {"checkpointing_full": "full", "checkpointing_selective": "selective"}
"""Check -> engine.activation_checkpointing."""


class Proof:
    """A family's model, saved, and transformers' answers about it."""

    def __init__(self, family: str, scratch: Path) -> None:
        options = FAMILIES[family] if family in FAMILIES else REFUSED[family][0]
        self._scratch = scratch
        self._model = save_model(family, options, scratch / "model")
        self._folders = {"logprobs": str(scratch / "model")}
        self._classifiers = {}
        for head in AUTO_CLASSES if family in FAMILIES else ():
            folder = scratch / f"saved {head}"
            self._classifiers[head] = save_model(family, options | {"num_labels": 1}, folder, head)
            self._folders[head] = str(folder)

    def on_one_rank(self, run_ranks) -> dict[str, str]:
        """Check -> PROVEN, or why not."""
        (found,) = run_ranks(on_one_rank, 1, self._folders, str(self._scratch))
        packing = verdict(found["packing"], self._packing)
        if isinstance(found["packing"], Refusal):
            return {"packing": packing}
        return {
            "packing": packing,
            **{
                check: verdict(found[check], lambda again: self._same_gradients(again, found["packing"]))
                for check in RECOMPUTED
            },
            "lora": verdict(found["lora"], lambda lora: self._lora("lora", lora, found["packing"])),
            "qlora": verdict(found["qlora"], lambda qlora: self._qlora(qlora, found["packing"])),
            "token_values": verdict(found["token_values"], self._token_values),
            "sequence_scores": verdict(found["sequence_scores"], self._sequence_scores),
            "embedded": verdict(found["embedded"], self._embedded),
        }

    def on_two_ranks(self, run_ranks) -> dict[str, str]:
        """Check -> PROVEN, or why not."""
        (one,) = run_ranks(alone, 1, self._folders, str(self._scratch))
        ranks = run_ranks(on_two_ranks, 2, self._folders, str(self._scratch))
        return {
            "fsdp2": verdict(ranks[0]["fsdp2"], lambda found: self._same_step(found, one["step"])),
            "ulysses": verdict(ranks[1]["ulysses"], lambda found: self._same_step(found, one["step"])),
            "expert_parallel": verdict(ranks[1]["expert_parallel"], lambda found: self._same_step(found, one["step"])),
            "lora_experts": verdict(
                ranks[1]["lora_experts"],
                lambda found: self._lora_experts(found, ranks[1]["fsdp2"], one["lora_experts"]),
            ),
            "export": verdict(ranks[0]["export"], self._export),
        }

    def _packing(self, found) -> None:
        """Trap 6: in a pack every sequence is what it is alone."""
        logprobs, gradients, _ = found
        for tokens, values in zip(sequences(), logprobs, strict=True):
            torch.testing.assert_close(values[1:], eager_logprobs(self._model, tokens), atol=2e-5, rtol=0)
        self._model.zero_grad()
        num_tokens = sum(LENGTHS) - len(LENGTHS)
        for tokens in sequences():
            scores = self._model(input_ids=tokens[None], use_cache=False).logits[0, :-1].log_softmax(-1)
            (-scores.gather(1, tokens[1:, None]).sum() / num_tokens).backward()
        expected = {n: p.grad for n, p in self._model.named_parameters() if p.grad is not None}
        assert expected.keys() <= gradients.keys(), expected.keys() - gradients.keys()
        unused = gradients.keys() - expected.keys()  # a vision tower without images to look at
        assert not any(gradients[name].any() for name in unused), unused
        largest = max(float(gradient.abs().max()) for gradient in expected.values())
        for name, gradient in expected.items():
            torch.testing.assert_close(gradients[name], gradient, atol=1e-4 * largest, rtol=1e-3)

    def _same_gradients(self, found, packing) -> None:
        expected = packing[1]
        largest = max(float(gradient.abs().max()) for gradient in expected.values())
        torch.testing.assert_close(found, expected, atol=1e-6 * largest, rtol=1e-5)

    def _lora_experts(self, found, step, alone) -> None:
        """On two ranks as on one, but for roundings that a large step has grown, and as peft and transformers compute
        it."""
        on, off, gradients = found
        self._lora("lora_experts", (on, off), step)
        torch.testing.assert_close(on, alone[0], atol=1e-4, rtol=0)
        largest = max(float(gradient.abs().max()) for gradient in alone[2].values())
        torch.testing.assert_close(gradients, alone[2], atol=1e-3 * largest, rtol=1e-3)

    def _lora(self, written, found, packing) -> None:
        from peft import PeftModel

        on, off = found
        assert all(map(torch.equal, off, packing[0])), "with the adapter off the model is not its base"
        base = self._loaded(self._folders["logprobs"])
        with warnings.catch_warnings(record=True) as heard:
            model = PeftModel.from_pretrained(base, self._scratch / written).eval()
        lost = [str(one.message) for one in heard if "missing adapter keys" in str(one.message)]
        assert not lost, "peft does not find tensors in an adapter's file that peft itself has named"
        merged = self._loaded(self._scratch / f"{written}_merged").eval()
        for tokens, values, without in zip(sequences(), on, off, strict=True):
            torch.testing.assert_close(values[1:], eager_logprobs(model, tokens), atol=1e-4, rtol=0)
            torch.testing.assert_close(values[1:], eager_logprobs(merged, tokens), atol=1e-4, rtol=0)
            assert (values - without).abs().max() > 1e-3, "the adapter does nothing"

    def _qlora(self, found, packing) -> None:
        on, off = found
        merged = self._loaded(self._scratch / "qlora").eval()
        for tokens, values, without, whole in zip(sequences(), on, off, packing[0], strict=True):
            torch.testing.assert_close(values[1:], eager_logprobs(merged, tokens), atol=1e-4, rtol=0)
            assert (values - without).abs().max() > 1e-3, "the adapter does nothing"
            assert (whole - without).abs().max() > 1e-3, "the base is not quantised"

    def _loaded(self, folder: str | Path):
        """A language model of this family, as transformers reads it."""
        model_class = language_model_class(
            self._model.config, AutoModelForCausalLM, AutoModelForImageTextToText, AutoModel
        )
        return model_class.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager")

    def _token_values(self, found) -> None:
        for own, expected in zip(found.new, self._of_new_head(found), strict=True):
            torch.testing.assert_close(own[1:], expected[:-1], atol=2e-5, rtol=1e-4)
        for values, model in self._before_and_after("token_values", found):
            for tokens, own in zip(sequences(), values, strict=True):
                expected = model(input_ids=tokens[None], use_cache=False).logits[0, :-1, 0]
                torch.testing.assert_close(own[1:], expected, atol=2e-5, rtol=1e-4)

    def _sequence_scores(self, found) -> None:
        expected = [values[-1] for values in self._of_new_head(found)]
        torch.testing.assert_close([own[-1] for own in found.new], expected, atol=2e-5, rtol=1e-4)
        for values, model in self._before_and_after("sequence_scores", found):
            expected = [model(input_ids=tokens[None], use_cache=False).logits[0, 0] for tokens in sequences()]
            assert len(set(torch.stack(expected).tolist())) == len(expected)
            torch.testing.assert_close([own[-1] for own in values], expected, atol=2e-5, rtol=1e-4)

    @torch.no_grad()
    def _of_new_head(self, found: HeadedValues) -> list[Tensor]:
        """[L] of every sequence, from the language model's states."""
        model = backbone(self._model)
        states = [model(input_ids=tokens[None], use_cache=False).last_hidden_state[0] for tokens in sequences()]
        return [each @ found.new_weight[0] for each in states]

    def _before_and_after(self, head, found: HeadedValues):
        reloaded = AUTO_CLASSES[head].from_pretrained(
            self._scratch / head, dtype=torch.float32, attn_implementation="eager", trust_remote_code=True
        )
        with torch.no_grad():
            yield found.saved, self._classifiers[head]
            yield found.trained, reloaded.eval()
        assert not all(map(torch.equal, found.saved, found.trained)), "a step changed nothing"

    def _embedded(self, found) -> None:
        for tokens, logprobs, trainer in found:
            assert len(tokens) == len(logprobs)
            torch.testing.assert_close(torch.tensor(logprobs), torch.tensor(trainer), atol=2e-5, rtol=1e-5)
        for prompt, (tokens, _, _) in zip(sequences(), found[: len(LENGTHS)], strict=True):
            whole = self._model.generate(
                prompt[None],
                attention_mask=torch.ones(1, len(prompt)),
                max_new_tokens=MAX_TOKENS,
                do_sample=False,
                suppress_tokens=media_token_ids(self._model.config) or None,  # which no completion may say
            )
            assert tokens == whole[0, len(prompt) :].tolist(), "another token than model.generate"

    def _same_step(self, found, alone) -> None:
        logprobs, gradients, weights = found
        torch.testing.assert_close(logprobs, alone[0], atol=1e-5, rtol=0)
        largest = max(float(gradient.abs().max()) for gradient in alone[1].values())
        torch.testing.assert_close(gradients, alone[1], atol=1e-5 * largest, rtol=1e-4)
        torch.testing.assert_close(weights, alone[2], atol=2e-5, rtol=0)

    def _export(self, _) -> None:
        """The tensors of save_pretrained, bit for bit."""
        saved, written = (
            {name: tensor for file in sorted(folder.glob("*.safetensors")) for name, tensor in load_file(file).items()}
            for folder in (self._scratch / "model", self._scratch / "export")
        )
        assert saved.keys() == written.keys(), saved.keys() ^ written.keys()
        for name, tensor in saved.items():
            assert tensor.dtype == written[name].dtype, name
            assert torch.equal(tensor, written[name]), name


def verdict(found: Any, compare: Callable[[Any], None]) -> str:
    if isinstance(found, Refusal):
        return found.reason
    try:
        compare(found)
    except AssertionError as error:
        return f"fails: {str(error).strip().splitlines()[0]}"
    return PROVEN
