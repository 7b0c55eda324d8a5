"""Trains and samples on a CUDA device that is pretended: `dry_run.py GROUP`, started by cuda_backend.py. Prints a line
of JSON for every case: its name, and the error that it ended with or null."""

import json
import sys
import tempfile
import traceback
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
from family_table import FAMILIES
from family_table import save_model as save_family
from gpu_sampling import requests
from pretended_cuda import PretendedCuda, put_into_torch
from small_gpu_model import LOSSES, build, drawn, packed, save_model
from tiny_models import tiny_vision_model
from torch.testing._internal.distributed.fake_pg import FakeStore
from vision_samples import request_of, vision_samples

from shardwise.data.packing import pack
from shardwise.recipes.losses import SFT_LOSS
from shardwise.rollout import EmbeddedEngine
from shardwise.types import Denominators, GenerateRequest, Sample, TokenBatch

DEVICE = torch.device("cuda", 0)
HALF = "param_dtype=bfloat16"
FULL, SELECTIVE = "activation_checkpointing=full", "activation_checkpointing=selective"
SMALL = {"num_hidden_layers": 2}
LORA = "lora.rank=4"
CORE = {
    "bfloat16": [],
    "QLoRA": [LORA, "lora.quantize_base=nf4"],
}
OPTIONS = {
    "float16": ["param_dtype=float16"],
    "activations on the host": [SELECTIVE, "activation_offload=true"],
    "tiled MLP": ["apply_tiled_mlp=true"],
    "LoRA with dropout": [LORA, "lora.dropout=0.1"],
    "float32": ["param_dtype=float32"],
    "bfloat16 masters": ["master_dtype=bfloat16"],
    "varlen": ["attention_implementation=varlen"],
    "loop": ["attention_implementation=loop"],
    "full checkpointing": [FULL],
    "selective checkpointing": [SELECTIVE],
    "parameters on the host": ["offload_policy=true"],
    "gathered until the backward pass": ["reshard_after_forward=false"],
    "reduced each time": ["reduce_gradients=each_micro_batch"],
    "LoRA": [LORA],
    "DoRA": [LORA, "lora.use_dora=true"],
}
OPTIMIZERS = ("adamw_8bit", "adamw_cpu", "muon")
LAYOUTS = {
    "HSDP": ["fsdp_size=2"],
    "replicas": ["fsdp_size=1"],
    "Ulysses": ["ulysses_size=2"],
    "HSDP and Ulysses": ["ulysses_size=2", "fsdp_size=2"],
}
NUM_RANKS = 4
TRAINED = ("gemma2", "gpt_oss", "deepseek_v3", "qwen3_moe", "qwen3_next", "llama4_text")
SAMPLED = ("gemma2", "qwen3_moe")
SEEING = ("gemma3", "internvl", "llava", "llava_next", "llava_onevision")
"""Families whose towers read no number of the device to decide on shapes."""

Case = Callable[[], None]


def filled(loss: str) -> list[Sample]:
    """Two micro-batches of samples with what the loss reads."""

    def numbers(sample: Sample) -> torch.Tensor:
        return torch.zeros(len(sample.token_ids))

    fields = {
        "sft": (),
        "value": ("values", "returns"),
        "policy": ("old_logprobs", "rollout_logprobs", "ref_logprobs", "advantages"),
    }[loss]
    return [replace(sample, **{name: numbers(sample) for name in fields}) for sample in drawn(2)]


def train(folder: Path, *options: str, loss: str = "sft", **settings) -> None:
    """Two optimizer steps, what a reference is asked for, and the weights of a sync."""
    engine = build(folder, DEVICE, HALF, *options, loss=loss, **settings)
    step, wanted = packed(filled(loss), num_batches=2), LOSSES[loss]
    learn(engine, step.shards[0], step.denominators, wanted)
    if loss == "value":
        return
    engine.forward(step.shards[0], with_entropy=True)
    if "offload_policy=true" not in options:
        for name, weight in engine.named_weights(torch.bfloat16):
            assert weight.device == DEVICE, f"{name} is on {weight.device}"


def learn(engine, batches: list[TokenBatch], denominators: Denominators, wanted) -> None:
    """Two optimizer steps on the same batches."""
    for _ in range(2):
        engine.forward_backward(batches, wanted.function, denominators, with_entropy=wanted.with_entropy)
        engine.optim_step()


def train_family(folder: Path) -> None:
    """Two optimizer steps of a tiny model."""
    engine = build(folder, DEVICE, HALF)
    lengths = (20, 5, 8, 8)
    masks = [torch.arange(length) > 1 for length in lengths]
    samples = [
        Sample(uid=f"{number}", token_ids=torch.full((len(mask),), 3), loss_mask=mask)
        for number, mask in enumerate(masks)
    ]
    step = pack(samples, num_shards=1, max_tokens=sum(lengths))
    learn(engine, step.shards[0], step.denominators, SFT_LOSS)


def sample(folder: Path, dtype: torch.dtype, wanted: list[GenerateRequest]) -> None:
    """Completions, logprobs of given sequences, and both again under weights of a trainer."""
    engine = EmbeddedEngine.from_folder(folder, dtype=dtype, max_rows=4, device=DEVICE)
    trainer = build(folder, DEVICE, f"param_dtype={str(dtype).removeprefix('torch.')}")
    for version in range(2):
        groups = engine.generate(wanted)
        assert all(completion.token_ids for group in groups for completion in group)
        engine.logprobs([[3, 4, 5, 6], [4, 5]])
        engine.load_weights(trainer.named_weights(dtype))
        engine.commit_weights(version + 1)


def train_on_images(folder: Path, samples: list[Sample]) -> None:
    """Two optimizer steps, in packs with images and without."""
    engine = build(folder, DEVICE, HALF)
    step = pack(samples, num_shards=1, max_tokens=64)
    learn(engine, step.shards[0], step.denominators, SFT_LOSS)


def sample_with_images(folder: Path, samples: list[Sample]) -> None:
    """Completions of prompts with images and without."""
    engine = EmbeddedEngine.from_folder(folder, dtype=torch.bfloat16, max_rows=4, device=DEVICE)
    engine.generate([request_of(sample, max_tokens=3, temperature=0.8) for sample in samples])


def cases(group: str, scratch: Path) -> Iterator[tuple[str, Case]]:
    """The name of each case, and what it does inside the mode."""
    qwen3 = save_model(scratch / "qwen3", **SMALL)
    match group:
        case "core":
            yield from ((name, partial(train, qwen3, *options)) for name, options in CORE.items())
            yield "policy", partial(train, qwen3, loss="policy")
            yield "answers", partial(sample, qwen3, torch.bfloat16, short_requests())
        case "options":
            yield from ((name, partial(train, qwen3, *options)) for name, options in OPTIONS.items())
            yield "value", partial(train, qwen3, loss="value")
            yield from ((name, partial(train, qwen3, optimizer=name)) for name in OPTIMIZERS)
            units = ["wrap_policy.wrap_embeddings=true", "wrap_policy.wrap_lm_output=true"]
            yield (
                "units of embeddings",
                partial(train, save_model(scratch / "untied", tie_word_embeddings=False, **SMALL), *units),
            )
        case "layouts":
            yield from ((name, partial(train, qwen3, *options)) for name, options in LAYOUTS.items())
        case "families":
            for family in TRAINED:
                save_family(family, FAMILIES[family], scratch / family)
                yield family, partial(train_family, scratch / family)
        case "vision":
            for family in SEEING:
                model, folder = tiny_vision_model(family), scratch / family
                model.save_pretrained(folder)
                samples = vision_samples(model)
                yield f"{family} learns", partial(train_on_images, folder, samples)
                yield f"{family} answers", partial(sample_with_images, folder, samples)
        case "mistake":
            yield "host and device", lambda: torch.ones(2, device=DEVICE) + torch.ones(2)
        case "rollout":
            yield "float32", partial(sample, qwen3, torch.float32, short_requests())
            small = [replace(one, prompt_ids=[3] * (len(one.prompt_ids) % 30 + 1)) for one in short_requests()]
            for family in SAMPLED:
                save_family(family, FAMILIES[family], scratch / family)
                yield family, partial(sample, scratch / family, torch.bfloat16, small)


def short_requests() -> list[GenerateRequest]:
    """Two completions of three tokens for every prompt."""
    return [replace(one, max_tokens=3) for one in requests(temperature=0.8, num_completions=2)]


def error_of(case: Case) -> str | None:
    """The error that a case ends with, and the project's lines that it came through."""
    try:
        with PretendedCuda():
            case()
    except Exception as error:
        lines = [f"{frame.filename}:{frame.lineno}" for frame in traceback.extract_tb(error.__traceback__)]
        own = [line for line in lines if "/shardwise/" in line or "/pretended_cuda/" in line]
        return f"{type(error).__name__}: {str(error)[:500]} ({' '.join(own[-5:])})"
    return None


def main() -> None:
    put_into_torch()
    group = sys.argv[1]
    world_size = NUM_RANKS if group == "layouts" else 1
    dist.init_process_group("cpu:fake,cuda:fake", store=FakeStore(), rank=0, world_size=world_size)
    with tempfile.TemporaryDirectory() as scratch:
        for name, case in cases(group, Path(scratch)):
            print(json.dumps({"name": name, "error": error_of(case)}), flush=True)


if __name__ == "__main__":
    main()
