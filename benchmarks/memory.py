"""Peak memory of what the engine does in pieces, against doing it at once; each figure is one run, and exact.

- full_logits: logprobs and entropy of N states at a vocabulary of 151,936, forward and backward, by
  engine/logprobs.py, against all logits in float32 with log_softmax (autograd).
- tiled_mlp: one feed-forward block on a long sequence, in slices against at once.
- step: forward_backward of a whole model on one long sequence under the memory options, against none of them.

Memory is counted, not sampled: torch's profiler records every allocation and release of tensor memory, and the peak of
their running sum is taken, above what lies there before (weights, inputs). It is what max_memory_allocated counts on a
GPU. Gradients that the work leaves behind are part of it, on both sides. Host memory is the device's memory here, so
activation_offload can save nothing on a CPU and is left out; benchmarks/gpu_train.py measures it.

    python -m benchmarks.memory
"""

import argparse
import gc
import os
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile

from benchmarks.harness import report, small_qwen3
from shardwise.config import EngineConfig, OptimizerConfig
from shardwise.controller.process_group import Rank, process_group
from shardwise.data.packing import pack
from shardwise.engine import TrainEngine
from shardwise.engine.logprobs import selected_logprobs
from shardwise.engine.tiled_mlp import TiledMLP
from shardwise.ops import LogitTransform
from shardwise.recipes.losses import sft_loss
from shardwise.types import Sample

VOCAB = 151_936
MIB = 2**20
FULL_LOGITS_COPIES = 4
"""Of all logits that log_softmax, entropy and their backward hold at their peak; only to see whether they would fit."""
STEP_OPTIONS = {
    "full": ["activation_checkpointing=full"],
    "selective": ["activation_checkpointing=selective"],
    "every_2nd_layer": ["activation_checkpointing=selective", "checkpoint_every_layers=2"],
    "tiled_mlp": ["apply_tiled_mlp=true"],
    "full_and_tiled_mlp": ["activation_checkpointing=full", "apply_tiled_mlp=true"],
}


def peak_allocated(work: Callable[[], object]) -> int:
    """Bytes of tensor memory that `work` holds at its peak, above what there was at its start."""
    gc.collect()
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        kept = work()
    del kept
    assert profiler.profiler is not None
    events = [event for event in profiler.profiler.kineto_results.events() if event.name() == "[memory]"]
    held = peak = 0
    for event in sorted(events, key=lambda event: event.start_ns()):
        held += event.nbytes()
        peak = max(peak, held)
    return peak


def ratio(ours: int, peer: int) -> float:
    return round(ours / peer, 4)


def full_logprobs(states: Tensor, weight: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    """What selected_logprobs computes, from all logits; the entropy has no gradient there either."""
    logs = (states.float() @ weight.float().t()).log_softmax(dim=-1)
    with torch.no_grad():
        entropy = -(logs.exp() * logs).sum(dim=-1)
    return logs.gather(1, targets[:, None])[:, 0], entropy


def chunked_logprobs(states: Tensor, weight: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    return selected_logprobs(states, weight, targets, temperature=1.0, transform=LogitTransform(), with_entropy=True)


def logits_peaks(num_states: int, hidden: int) -> dict[str, int]:
    """Forward and backward of both; they must agree."""
    torch.manual_seed(0)
    states = torch.randn(num_states, hidden).requires_grad_()
    weight = (torch.randn(VOCAB, hidden) / hidden**0.5).requires_grad_()
    targets = torch.randint(0, VOCAB, (num_states,))
    sums, peaks = {}, {}
    for name, function in {"ours": chunked_logprobs, "full": full_logprobs}.items():
        results: list[tuple[Tensor, Tensor]] = []

        def work(
            function: Callable[..., tuple[Tensor, Tensor]] = function, results: list[tuple[Tensor, Tensor]] = results
        ) -> None:
            logprobs, entropy = function(states, weight, targets)
            logprobs.sum().backward()
            results.append((logprobs.detach(), entropy))

        peaks[name] = peak_allocated(work)
        sums[name] = torch.stack([*results[0]])
        states.grad = weight.grad = None
    torch.testing.assert_close(sums["ours"], sums["full"], rtol=0, atol=1e-4)
    return peaks


def measure_logits(num_states: int, hidden: int) -> dict[str, Any] | None:
    """None where all logits would not fit into this machine's free memory."""
    if FULL_LOGITS_COPIES * 4 * num_states * VOCAB > 0.8 * os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_AVPHYS_PAGES"):
        return None
    peaks = logits_peaks(num_states, hidden)
    return {"ratio": ratio(peaks["ours"], peaks["full"]), **{f"{k}_mib": round(v / MIB, 1) for k, v in peaks.items()}}


def mlp_peak(mlp: nn.Module, tokens: Tensor) -> int:
    leaf = tokens.detach().requires_grad_()
    peak = peak_allocated(lambda: mlp(leaf).sum().backward())
    mlp.zero_grad(set_to_none=True)
    return peak


def measure_tiled_mlp(*, num_tokens: int, hidden: int, intermediate: int) -> dict[str, Any]:
    from transformers.models.qwen3.modeling_qwen3 import Qwen3MLP

    config = small_qwen3(512)
    config.hidden_size, config.intermediate_size = hidden, intermediate
    mlp, tokens = Qwen3MLP(config), torch.randn(1, num_tokens, hidden)
    whole = mlp_peak(mlp, tokens)
    slices = {num_shards: mlp_peak(TiledMLP(mlp, num_shards), tokens) for num_shards in (4, 16)}
    shape = {"num_tokens": num_tokens, "hidden": hidden, "intermediate": intermediate}
    ratios = {f"{num_shards}_slices": ratio(peak, whole) for num_shards, peak in slices.items()}
    return {**shape, "at_once_mib": round(whole / MIB, 1), "ratios": ratios}


def step_peak(folder: Path, options: list[str], num_tokens: int) -> int:
    """forward_backward of one sequence, the second of two steps: the first one warms up what stays."""
    config = EngineConfig.load(None, options)
    engine = TrainEngine.build(folder, config, device=torch.device("cpu"), optimizer=OptimizerConfig())
    tokens = torch.randint(3, 512, (num_tokens,), generator=torch.Generator().manual_seed(0))
    sample = Sample(uid="long", token_ids=tokens, loss_mask=torch.arange(num_tokens) > 0)
    packed = pack([sample], num_shards=1, max_tokens=num_tokens)

    def step() -> None:
        engine.forward_backward(packed.shards[0], sft_loss, packed.denominators)

    step()
    engine.optim_step()
    return peak_allocated(step)


def measure_steps(*, num_tokens: int, layers: int, intermediate: int) -> dict[str, Any]:
    from transformers import Qwen3ForCausalLM

    config = small_qwen3(512)
    config.num_hidden_layers, config.intermediate_size = layers, intermediate
    config.layer_types = ["full_attention"] * layers
    with (
        tempfile.TemporaryDirectory() as name,
        process_group(Rank.from_environment(), device_type="cpu", timeout_seconds=600),
    ):
        torch.manual_seed(0)
        Qwen3ForCausalLM(config).save_pretrained(name)
        none = step_peak(Path(name), [], num_tokens)
        ratios = {}
        for label, options in STEP_OPTIONS.items():
            ratios[label] = ratio(step_peak(Path(name), options, num_tokens), none)
            print(f"step {label}: {ratios[label]}", flush=True)
    shape = {"num_tokens": num_tokens, "hidden": 256, "layers": layers, "intermediate": intermediate}
    return {**shape, "none_mib": round(none / MIB, 1), "ratios": ratios}


def main() -> None:
    parser = argparse.ArgumentParser(description="peak memory of chunked logprobs, tiled MLPs and checkpointing")
    parser.add_argument("--states", nargs="+", type=int, default=[1024, 4096])
    parser.add_argument("--hidden", nargs="+", type=int, default=[64, 256])
    parser.add_argument("--seq", type=int, default=4096, help="tokens of the long sequence")
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--intermediate", type=int, default=1024, help="feed-forward width of the whole model")
    parser.add_argument("--no-write", action="store_true", help="leave benchmarks/results as it is")
    args = parser.parse_args()
    values: dict[str, Any] = {"vocabulary": VOCAB, "dtype": "float32"}
    ratios: dict[str, float] = {}
    for num_states in args.states:
        for hidden in args.hidden:
            name = f"full_logits_{num_states}x{hidden}"
            values[name] = measure_logits(num_states, hidden) or "skipped: all logits would not fit into free memory"
            if isinstance(values[name], dict):
                ratios[name] = values[name]["ratio"]
            print(f"{name}: {values[name]}", flush=True)
    # The headline is the worst case.
    ratios = {"full_logits": max(ratios.values()), **ratios} if ratios else {}
    values["tiled_mlp"] = measure_tiled_mlp(num_tokens=4 * args.seq, hidden=256, intermediate=2048)
    print(f"tiled_mlp: {values['tiled_mlp']}", flush=True)
    values["step"] = measure_steps(num_tokens=args.seq, layers=args.layers, intermediate=args.intermediate)
    for group in ("tiled_mlp", "step"):
        ratios |= {f"{group}_{label}": value for label, value in values[group]["ratios"].items()}
    report("memory", ratios={}, memory_ratios=ratios, values=values, write=not args.no_write)


if __name__ == "__main__":
    main()
