"""What vLLM can be proven to serve of a model family, on one gloo rank, against the trainer."""

import copy
import json
import os
import re
import shutil
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import transformers
from family_checks import MAX_TOKENS, accumulate, build, outputs, packed, sequences
from family_table import COMMON, FAMILIES, random_model
from ranks import RankError
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from transformers import PreTrainedTokenizerFast, Qwen2VLImageProcessorPil
from vllm_engines import ARGS, CPU

from shardwise.config import LoraConfig, VllmRollout
from shardwise.data.packing import unpack
from shardwise.engine import TrainEngine
from shardwise.engine.files.adapters import attach_adapter
from shardwise.families import PROVEN
from shardwise.recipes.weight_sync import KnownPrompt, compare_logprobs
from shardwise.rollout import VllmEngine
from shardwise.transfer import WeightSyncError, sync_local
from shardwise.types import GenerateRequest

BOUND = 1e-4
"""Of a logprob, in nats: the largest difference of any proven family is 4e-5, which is rounding that random models with
large weights grow; the smallest one that is none is 3e-3."""

WIDER = {
    "hidden_size": 64,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 32,
    "n_embd": 64,
    "n_head": 2,
    "mrope_section": [8, 4, 4],
}
"""In every family: heads of a width that vLLM's CPU build has kernels for."""

SPECIAL = {"<|image_pad|>": 90, "<|video_pad|>": 91, "<|vision_start|>": 92, "<|vision_end|>": 93}
"""Words that Qwen's processors look for."""
SEEN = {"image_token_id": 90, "video_token_id": 91, "vision_start_token_id": 92, "vision_end_token_id": 93}
SEEN |= {"vision_config": {"out_hidden_size": 64}}
INTERLEAVED = SEEN | {"text_config": {"rope_parameters": {"mrope_interleaved": True}}}
NO_WINDOW = {"use_sliding_window": False, "sliding_window": None}
LATENT = {"kv_lora_rank": 512, "qk_rope_head_dim": 64, "head_dim": 64, "num_key_value_heads": 2}
"""The one width of multi-head latent attention that the CPU build has a kernel for."""
BIASED = LATENT | {"topk_method": "noaux_tc"}
BLIND = {"limit_mm_per_prompt": {"image": 0, "video": 0, "audio": 0}}
WITHOUT_PROCESSOR = ("gemma3", "gemma4", "glm4v", "glm46v", "glm4v_moe")
"""Their towers are left out of vLLM, which would start a processor that is not Qwen's."""
CHANGES: dict[str, dict[str, Any]] = {
    "jetmoe": {"kv_channels": 32},
    "gpt_neox": {"num_key_value_heads": 2},  # has no groups of heads, and vLLM goes by the key
    "cohere": {"num_key_value_heads": 2},  # it does not give one head to two ranks
    "gpt_oss": {"intermediate_size": 64, "num_key_value_heads": 2},  # likewise
    "olmoe": {"num_key_value_heads": 2},  # likewise
    "minicpm3": {"qk_nope_head_dim": 24},
    "deepseek_v2": LATENT,
    "youtu": LATENT,
    "bamba": {"mamba_d_head": 16},
    "granitemoehybrid": {"mamba_d_head": 16},
    "zamba2": {"attention_head_dim": 64, "attention_hidden_size": 128, "mamba_headdim": 32, "num_key_value_heads": 2},
    # What config.json has on the hub, where vLLM reads it, and transformers does not write.
    "deepseek_v3": BIASED,
    "glm4_moe_lite": BIASED,
    "axk1": BIASED,
    "minimax_m2": {"rotary_dim": 32, "scoring_func": "sigmoid", "use_routing_bias": True},
    "afmoe": {"score_func": "sigmoid", "route_norm": True, "n_group": 1, "topk_group": 1},
    "hy_v3": {"first_k_dense_replace": 1, "expert_hidden_dim": 16, "route_norm": True, "qk_norm": True},
    "glm4v": {"text_config": {"attention_bias": True}},
    "glm46v": {"text_config": {"attention_bias": True}},
    "glm4v_moe": {"text_config": {"attention_bias": True, "use_qk_norm": False}},
    "mimo_v2_flash": {"hybrid_layer_pattern": [1, 0], "moe_layer_freq": [0, 1], "sliding_window_size": 4}
    | {
        "swa_num_attention_heads": 2,
        "swa_num_key_value_heads": 1,
        "swa_head_dim": 32,
        "swa_v_head_dim": 12,
        "layernorm_epsilon": 1e-5,
    },
    "lfm2": {"conv_dim": 64, "block_dim": 64},
    "qwen2_vl": SEEN | {"vision_config": {"hidden_size": 64}},
    "qwen2_5_vl": SEEN,
    "qwen3_vl": INTERLEAVED,
    "qwen3_vl_moe": INTERLEAVED | {"text_config": INTERLEAVED["text_config"] | {"norm_topk_prob": True}},
    **dict.fromkeys(
        ("qwen3_5", "qwen3_5_moe"),
        SEEN | {"text_config": {"rope_parameters": {"mrope_interleaved": True, "mrope_section": [2, 1, 1]}}},
    ),
}
"""Further shapes, and keys."""


@dataclass(frozen=True)
class Lack:
    """Of a family, that vLLM leaves out or has otherwise; the rest of it is compared without."""

    options: dict[str, Any]
    """Of the config, that leave it out."""
    words: str


WINDOWS = Lack(NO_WINDOW, "windows in some layers")
LACKS = {
    "qwen2": WINDOWS,
    "qwen3": WINDOWS,
    "qwen2_moe": WINDOWS,
    "gpt2": Lack({"scale_attn_by_inverse_layer_idx": False}, "scores divided by the number of their layer"),
    "stablelm": Lack(
        {"qk_layernorm": False, "use_parallel_residual": False},
        "norms of queries and keys, and layers whose attention and MLP are computed beside each other",
    ),
    "olmoe": Lack(
        {"clip_qkv": None, "norm_topk_prob": False},
        "bounds of queries, keys and values; weights of experts that add up to 1",
    ),
    "falcon_h1": Lack({"mamba_norm_before_gate": False}, "norms before the gate"),
    "gpt_oss": Lack({"swiglu_limit": 7.0}, "bounds in the experts other than 7, which its CPU build has by heart"),
    "llama4_text": Lack({"attention_chunk_size": 128}, "chunks that are no multiple of its cache blocks"),
}


def widened(family: str, *, with_lacks: bool = False) -> dict[str, Any]:
    """The options of family_table.py, in shapes that vLLM's CPU kernels take."""
    changes = copy.deepcopy(CHANGES.get(family, {}))
    if family in LACKS and not with_lacks:
        changes |= LACKS[family].options
    options = copy.deepcopy(FAMILIES[family])
    if "text_config" in options:
        return merged(options | {"text_config": wider(options["text_config"])}, changes)
    return merged(wider({name: COMMON[name] for name in WIDER if name in COMMON} | options), changes)


def wider(options: dict[str, Any]) -> dict[str, Any]:
    return {
        name: wider(value) if isinstance(value, dict) else WIDER.get(name, value) for name, value in options.items()
    }


def merged(options: dict[str, Any], changes: dict[str, Any]) -> dict[str, Any]:
    return options | {
        name: merged(options[name], value) if isinstance(value, dict) and name in options else value
        for name, value in changes.items()
    }


def save_pair(family: str, scratch: Path, *, with_lacks: bool = False) -> dict[str, str]:
    """Two folders with one config and other weights. Under `hub` the other's, laid out as on the hub."""
    model = random_model(family, widened(family, with_lacks=with_lacks))
    folders = {}
    for name in ("model", "other"):
        folder = scratch / name
        model.save_pretrained(folder)
        if "text_config" in FAMILIES[family]:
            save_processor(folder)
        folders[name] = str(folder)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.copy_(parameter.flatten()[torch.randperm(parameter.numel())].view_as(parameter))
    folders["hub"] = folders["other"]
    if family == "qwen3_vl_moe":
        folders["hub"] = str(shutil.copytree(folders["other"], scratch / "hub"))
        transpose_experts(scratch / "hub" / "model.safetensors")
    return folders


def transpose_experts(file: Path) -> None:
    """transformers reads them either way, and writes them as it computes with them."""
    tensors = load_file(file)
    save_file({n: t.transpose(1, 2).contiguous() if ".experts." in n else t for n, t in tensors.items()}, file)


def save_processor(folder: Path) -> None:
    """With a tokenizer of words w0, w1, ...: vLLM starts it, though it is given no images here."""
    names = {number: word for word, number in SPECIAL.items()}
    words = {names.get(number, f"w{number}"): number for number in range(COMMON["vocab_size"])}
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=Tokenizer(WordLevel(words, unk_token="w4")))
    tokenizer.add_special_tokens({"additional_special_tokens": list(SPECIAL)})
    tokenizer.save_pretrained(folder)
    Qwen2VLImageProcessorPil(patch_size=4, size={"shortest_edge": 64, "longest_edge": 4096}).save_pretrained(folder)


@dataclass(frozen=True)
class Served:
    """Logprobs of the trainer and of vLLM after a sync."""

    completions: list[tuple[list[float], list[float]]]
    """Of sampled tokens: vLLM's, the trainer's."""
    scores: list[tuple[list[float], list[float]]]
    """Of given tokens, likewise."""
    without: list[list[float]]
    """The trainer's of given tokens, of the weights that vLLM had before."""
    num_tensors: int
    """In the receipt."""
    probe: str | None
    """What a run would have ended with."""

    @property
    def difference(self) -> float:
        """The largest."""
        pairs = (*self.completions, *self.scores)
        return max(abs(own - other) for found, expected in pairs for own, other in zip(found, expected, strict=True))

    @property
    def change(self) -> float:
        """By the new weights: the largest in the sequence where it is smallest."""
        return min(
            max(abs(new - old) for new, old in zip(expected, before, strict=True))
            for (_, expected), before in zip(self.scores, self.without, strict=True)
        )


def open_engine(folder: str, lora: LoraConfig | None = None, *, num_ranks: int = 1) -> VllmEngine:
    model_type = json.loads((Path(folder) / "config.json").read_text(encoding="utf-8"))["model_type"]
    cut = {"tensor_parallel_size": num_ranks} if num_ranks > 1 else {}
    return VllmEngine.from_folder(
        Path(folder),
        VllmRollout(args=ARGS | cut | (BLIND if model_type in WITHOUT_PROCESSOR else {})),
        dtype=torch.float32,
        max_rows=4,
        device=CPU,
        attach_adapter=None if lora is None else partial(attach_adapter, config=lora),
    )


def compared(rollout: VllmEngine, engine: TrainEngine, without: list[list[float]], num_tensors: int) -> Served:
    """Greedily and at random, of prompts that are computed together."""
    requests = [
        GenerateRequest(uid=f"{i} {t}", prompt_ids=prompt.tolist(), max_tokens=MAX_TOKENS, temperature=t)
        for t in (0.0, 1.0)
        for i, prompt in enumerate(sequences())
    ]
    found = [group[0] for group in rollout.generate(requests)]
    wholes = [torch.tensor(r.prompt_ids + one.token_ids) for r, one in zip(requests, found, strict=True)]
    step = packed(wholes)
    scored = unpack(step, [[out.logprobs for out in engine.forward(step.shards[0])]])
    completions = [
        (one.logprobs, own[len(r.prompt_ids) :].tolist()) for r, one, own in zip(requests, found, scored, strict=True)
    ]
    known = [
        KnownPrompt(str(number), tokens.tolist(), list(range(1, len(tokens))))
        for number, tokens in enumerate(sequences())
    ]
    given, own = rollout.logprobs([prompt.token_ids for prompt in known]), given_logprobs(engine)
    try:
        compare_logprobs(1, known, own, given, dtype="float32", rank=0)
        probe = None
    except WeightSyncError as error:
        probe = str(error)
    return Served(completions, list(zip(given, own, strict=True)), without, num_tensors, probe)


def given_logprobs(engine: TrainEngine) -> list[list[float]]:
    return [values[1:].tolist() for values in outputs(engine)]


def served(folders: dict[str, str]) -> list[Served]:
    """After the first sync, and after that of a step."""
    engine = build(Path(folders["model"]))
    rollout = open_engine(folders["hub"])
    without = given_logprobs(build(Path(folders["other"])))
    found = []
    for version in (1, 2):
        receipt = sync_local(engine.named_weights(torch.float32), rollout, version=version)
        found.append(compared(rollout, engine, without, receipt.num_tensors))
        without = [own for _, own in found[-1].scores]
        accumulate(engine)
        engine.optim_step()
    rollout.close()
    return found


def served_in_parts(folders: dict[str, str]) -> list[Served]:
    """Like `served`, by ranks that each have a part of the model, and are sent what they need of it."""
    rank, size = dist.get_rank(), dist.get_world_size()
    os.environ |= {"RANK": f"{rank}", "LOCAL_RANK": f"{rank}", "WORLD_SIZE": f"{size}"}
    os.environ["VLLM_CPU_OMP_THREADS_BIND"] = "|".join(map(str, range(size)))  # on one NUMA node it has to be told
    engine = build(Path(folders["model"]))
    rollout = open_engine(folders["hub"], num_ranks=size)
    without = given_logprobs(build(Path(folders["other"])))
    found, sent = [], []
    for version in (1, 2):
        needed = rollout.needed_regions()
        receipt = sync_local(engine.needed_weights(torch.float32, needed), rollout, version=version)
        sent.append(receipt.num_bytes / (4 * engine.num_parameters))
        found.append(compared(rollout, engine, without, receipt.num_tensors))
        without = [own for _, own in found[-1].scores]
        accumulate(engine)
        engine.optim_step()
    rollout.close()
    assert max(sent) < 0.9, "half of each matrix, and all of a router and of a norm"
    return found


def served_adapter(folders: dict[str, str]) -> list[Served]:
    """After the sync of an adapter that took a step, to a model that has its base."""
    lora = LoraConfig(rank=4)
    engine = build(Path(folders["model"]), lora=lora)
    rollout = open_engine(folders["model"], lora)
    without = given_logprobs(engine)
    accumulate(engine)
    engine.optim_step()
    receipt = sync_local(engine.adapter_weights(torch.float32), rollout, version=1)
    assert receipt.num_proven == receipt.num_tensors
    found = [compared(rollout, engine, without, receipt.num_tensors)]
    rollout.close()
    return found


RELEASE = ".".join(transformers.__version__.split(".")[:2])
NO_KERNEL = "vLLM's CPU build has no kernel for"
REASONS = {
    r"Unrecognized model identifier": f"transformers {RELEASE}, which vLLM goes with, has no such model",
    r"supported are chunked_attention": f"the trainer does not take it with transformers {RELEASE}",
    r"whose indexer is of another kind": f"the trainer does not take it with transformers {RELEASE}",
    r"selected_experts = self\.router": "vLLM has no such model, and cannot run the router of transformers",
    r"assert top_k is not None": "vLLM has no such model, and cannot run the experts of transformers",
    r"'AllBefore' object has no attribute 'dtype'": f"the trainer does not take it with transformers {RELEASE}",
    r"not initialized from checkpoint: .*\.0\.post_mlp_layernorm": "vLLM wants a norm of dense layers, which those of "
    "transformers do not have",
    r"'triton' has no attribute 'next_power_of_2'": f"{NO_KERNEL} its attention",
    r"--mamba-block-size can only be set": "vLLM's CPU build sets what it then refuses",
    r"is_act_and_mul=False is supported only": f"{NO_KERNEL} experts without gates",
    r"view size is not compatible": "vLLM has no such model, and cannot run that of transformers",
    r"CPU GDN attention requires BF16": f"{NO_KERNEL} gated delta nets in float32",
    r"'triton' has no attribute 'set_allocator'": f"{NO_KERNEL} gated delta nets as they are here",
    r"is not supported by MLA": f"{NO_KERNEL} latent attention of this width",
    r"assert self\.scoring_func == \"softmax\"": f"{NO_KERNEL} routers of sigmoids without groups",
    r"expected target modules in|could not be wrapped by any LoRA layer": "vLLM takes no adapters of projections that "
    "checkpoints have fused",
    r"no kernel for fused experts beside adapters": f"{NO_KERNEL} fused experts beside adapters",
    r"does not support LoRA yet": "vLLM takes no adapters of it",
    r"leave adapters of the vision tower out": "vLLM would leave adapters of the vision tower out",
    r"does not dispatch through the Transformers": "vLLM has no such model, and cannot run that of transformers",
}
"""What an error says -> what the record says."""
ROTATES_WRONG = "the kernel of vLLM's CPU build rotates queries of latent attention wrongly"
CAUSES = {
    **dict.fromkeys(("deepseek_v2", "deepseek_v3", "axk1", "glm4_moe_lite"), ROTATES_WRONG),
    "jetmoe": "transformers' attention repeats keys and values before it hands them to vLLM's, which does it again",
    "apertus": "vLLM holds two numbers of its activation in bfloat16",
    "gemma3n_text": "vLLM leaves out the embeddings that each layer has of its own",
    "bitnet": "its norms see a rank's part alone",
    "ernie4_5_moe": "vLLM's CPU build leaves out the bias by which the router chooses",
}
"""Why logprobs differ, by family."""


VLLM_CHECKS = ("vllm", "vllm_lora", "vllm_ranks")


def prove(family: str, scratch: Path, run_ranks) -> dict[str, str]:
    """What is found of it: a row of the record."""
    try:
        folders = save_pair(family, scratch)
    except ValueError as error:
        row = dict.fromkeys(VLLM_CHECKS, reason_of(str(error)))
    else:
        row = {"vllm": verdict(family, served, folders, run_ranks)}
        is_served = row["vllm"] == PROVEN
        row["vllm_lora"] = verdict(family, served_adapter, folders, run_ranks) if is_served else row["vllm"]
        row["vllm_ranks"] = verdict(family, served_in_parts, folders, run_ranks, 2) if is_served else row["vllm"]
    return row | ({"lacks": LACKS[family].words} if family in LACKS else {})


def verdict(family: str, check, folders: dict[str, str], run_ranks, num_ranks: int = 1) -> str:
    try:
        found = [one for of_rank in run_ranks(check, num_ranks, folders) for one in of_rank]
    except RankError as error:
        for name in Path("/dev/shm").glob("*cpushm*"):  # of an engine that has not come to its start
            name.unlink()
        return reason_of(str(error))
    difference = max(one.difference for one in found)
    if not difference <= BOUND:  # it may be no number
        unseen = "" if all(one.probe for one in found) else ", which a sync does not find"
        return f"logprobs differ by {difference:.1g}{unseen}: {CAUSES.get(family, 'the cause is not known')}"
    unchanged = [one for one in found if one.change <= 0.1 or one.probe is not None]
    return f"fails: {unchanged[0]}" if unchanged else PROVEN


def is_noticed(folders: dict[str, str], run_ranks) -> bool:
    """Whether a run with them would end: at the start, while it generates, or at a sync."""
    try:
        (found,) = run_ranks(served, 1, folders)
    except RankError as error:
        return re.search(r"vLLM (cannot start|engine of rank 0 failed|leaves)", str(error)) is not None
    return all(one.probe for one in found)


def reason_of(error: str) -> str:
    """In our words, where we have any."""
    for pattern, words in REASONS.items():
        if re.search(pattern, error):
            return words
    print(error, flush=True)
    return f"fails: {error.strip().splitlines()[-1]}"
