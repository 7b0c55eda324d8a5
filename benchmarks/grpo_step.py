"""A whole GRPO step on fixed prompts: tokens per second of Shardwise's recipe and of TRL's GRPOTrainer.

A step samples completions, judges them, scores them under the frozen reference and makes one optimizer step. With one
optimizer step for each rollout the old logprobs are the current ones, so neither side computes them apart. Every side
is one process on the same model, prompts, group size, temperature, KL coefficient, optimizer, dtype (float32) and
threads; they take turns of a few steps each. The model ends a completion with a constant probability per token, so
lengths vary alike on both sides. Tokens are those of prompts and completions; padding is not counted.

TRL samples in two ways: `model.generate` and transformers' continuous batching, with a paged cache of the size of the
batch. The headline, `trl`, is the ratio to the faster of them.

`trl_train` is the same step with completions read from a file, the same token ids on both sides: what is left is
decoding, rewards, reference logprobs and the update. Its first steps must agree in loss, gradient norm, KL divergence
and reward before anything is timed.

TRL runs where it is installed: in --peer-python (see peers/requirements.txt), or here.
"""

import argparse
import json
import random
import statistics
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from benchmarks.harness import paired_ratios, report
from benchmarks.peers.grpo_task import COMPLETIONS_FILE, LONGEST_PROMPT, PROMPTS_FILE, SHORTEST_PROMPT, GrpoTask
from benchmarks.peers.lockstep import Child
from benchmarks.rollout_throughput import EOS, FIRST_TOKEN, build_model
from benchmarks.sft_throughput import find_peer

VOCAB = 4096
NUM_CHECKED_STEPS = 3
FIRST_BOUNDS = {"loss": 1e-5, "grad_norm": 1e-4, "kl": 1e-6, "reward": 1e-6}
LATER_BOUNDS = {"loss": 1e-4, "grad_norm": 5e-2, "kl": 5e-2, "reward": 1e-6}
"""How far the sides may be apart, in the first step and in those after it: relative to the larger of the two figures,
but absolutely for the loss, a mean around 0. Adam's first updates are near +-learning_rate however small a gradient is,
so that rounding alone drives the sides apart from the second step on: TRL differs by 5 % in KL from itself with
another micro-batch."""


def build_task(folder: Path, task: GrpoTask, *, mean_tokens: float, num_rounds: int = 4) -> None:
    """Saves model, tokenizer, prompts and canned completions.

    Args:
        mean_tokens: of completions if none were cut; canned lengths are drawn from the same (geometric) distribution.
        num_rounds: steps until the prompts begin again.
    """
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    folder.mkdir()
    build_model(folder, mean_tokens=mean_tokens)
    vocabulary = {"<pad>": 0, "<eos>": EOS} | {f"w{token}": token for token in range(FIRST_TOKEN, VOCAB)}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<pad>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<eos>").save_pretrained(folder)
    rng = random.Random(1)

    def tokens(count: int) -> list[int]:
        return [rng.randrange(FIRST_TOKEN, VOCAB) for _ in range(count)]

    def completion() -> list[int]:
        length = next((n for n in range(1, task.max_tokens + 1) if rng.random() < 1 / mean_tokens), task.max_tokens + 1)
        return [*tokens(length - 1), EOS] if length <= task.max_tokens else tokens(task.max_tokens)

    num_prompts = num_rounds * task.num_prompts
    prompts = [
        " ".join(f"w{token}" for token in tokens(rng.randint(SHORTEST_PROMPT, LONGEST_PROMPT)))
        for _ in range(num_prompts)
    ]
    rows = [json.dumps({"prompt": prompt, "reward_model": {"ground_truth": ""}}) for prompt in prompts]
    (folder / PROMPTS_FILE).write_text("\n".join(rows) + "\n")
    canned = {prompt: [completion() for _ in range(task.group_size)] for prompt in prompts}
    (folder / COMPLETIONS_FILE).write_text(json.dumps(canned))
    task.save(folder)


def start(side: str, folder: Path, task: GrpoTask, peer_python: str, micro_batch: int) -> Child:
    """One side's process, loaded and waiting."""
    arguments = ["--folder", str(folder)]
    if side == "ours":
        return Child(sys.executable, "benchmarks.grpo_worker", arguments, threads=task.threads)
    arguments += ["--micro-batch", str(micro_batch)]
    if side == "trl_continuous":
        arguments.append("--continuous-batching")
    return Child(peer_python, "benchmarks.peers.trl_grpo", arguments, threads=task.threads)


def check_agreement(ours: Mapping[str, Any], peer: Mapping[str, Any]) -> dict[str, Any]:
    """Stops the benchmark unless the first steps on canned completions agree. TRL logs one step late.

    From the second step on the policy is not the reference any more, so the KL term counts too.

    Args:
        ours, peer: answers of the first NUM_CHECKED_STEPS + 1 steps.
    Returns:
        The figures of the first step and the largest differences, first and later.
    Raises:
        SystemExit: a figure differs by more than its bound.
    """
    found: dict[str, Any] = {"steps": NUM_CHECKED_STEPS}
    for name in FIRST_BOUNDS:
        pairs = list(zip(_column(ours, name)[:-1], _column(peer, name)[1:], strict=True))
        apart = [_difference(*pair, relative=name != "loss") for pair in pairs]
        if apart[0] > FIRST_BOUNDS[name] or max(apart[1:]) > LATER_BOUNDS[name]:
            raise SystemExit(
                f"the sides do not compute the same {name}: (ours, trl) are {pairs}, {apart} apart, allowed "
                f"{FIRST_BOUNDS[name]:g} in the first step and {LATER_BOUNDS[name]:g} after it"
            )
        found[name] = {"ours": pairs[0][0], "trl": pairs[0][1], "difference": apart[0], "later": max(apart[1:])}
    return found


def _column(answer: Mapping[str, Any], name: str) -> list[float]:
    """A figure of every step."""
    return list(answer["losses"]) if name == "loss" else [step[name] for step in answer["figures"]]


def _difference(a: float, b: float, *, relative: bool) -> float:
    scale = max(abs(a), abs(b)) if relative else 1.0
    return abs(a - b) / scale if scale else 0.0


def measure(
    children: Mapping[str, Child], *, rounds: int, steps_per_turn: int
) -> tuple[dict[str, float], dict[str, Any]]:
    """Runs the sides in turns, in rotating order.

    Returns:
        The headline ratio of each peer, and everything that was measured.
    """
    sides = list(children)
    answers: dict[str, list[dict[str, Any]]] = {side: [] for side in sides}
    for turn in range(rounds):
        first = turn % len(sides)
        for side in sides[first:] + sides[:first]:
            answers[side].append(children[side].steps(steps_per_turn))
    rates = {side: [a["tokens"] / a["seconds"] for a in turns] for side, turns in answers.items()}
    cpu_rates = {side: [a["tokens"] / a["cpu_seconds"] for a in turns] for side, turns in answers.items()}
    ratios: dict[str, float] = {}
    values: dict[str, Any] = {}
    for side in sides:
        steps = [figures for answer in answers[side] for figures in answer["figures"]]
        values[side] = {
            "tokens_per_second": round(statistics.median(rates[side])),
            "tokens_per_cpu_second": round(statistics.median(cpu_rates[side])),
            "seconds_per_step": round(statistics.median(a["seconds"] for a in answers[side]) / steps_per_turn, 2),
            "mean_completion_tokens": round(statistics.mean(figures["completion_tokens"] for figures in steps), 1),
        }
        if side == "ours":
            spans = [name for name in steps[0] if name.startswith("seconds/")]
            values[side] |= {name: round(statistics.median(step[name] for step in steps), 3) for name in spans}
        else:
            ratio = paired_ratios(rates["ours"], rates[side])
            values[side] |= {"ratio": ratio, "cpu_ratio": paired_ratios(cpu_rates["ours"], cpu_rates[side])}
            ratios[side] = ratio["median"]
        print(side, values[side], flush=True)
    return ratios, values


def parse_arguments(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="a GRPO step against TRL's GRPOTrainer")
    parser.add_argument("--peer-python", help="the interpreter that has trl; default: this one, if it has")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps-per-turn", type=int, default=2)
    parser.add_argument("--prompts", type=int, default=8, help="of one step")
    parser.add_argument("--group-size", type=int, default=8)
    parser.add_argument("--max-tokens", type=int, default=128, help="the longest completion")
    parser.add_argument("--mean-tokens", type=float, default=80.0, help="mean length of completions if none were cut")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--trl-micro-batch", type=int, default=4, help="completions in one pass of TRL's training")
    parser.add_argument("--no-write", action="store_true", help="leave benchmarks/results as it is")
    return parser.parse_args(arguments)


def main() -> None:
    args = parse_arguments()
    peer = find_peer(args.peer_python)
    if peer is None:
        raise SystemExit("trl is not installed here; name an interpreter that has it with --peer-python")
    task = GrpoTask(
        num_prompts=args.prompts,
        group_size=args.group_size,
        max_tokens=args.max_tokens,
        temperature=1.0,
        kl_coef=0.04,
        learning_rate=1e-6,
        threads=args.threads,
        canned=False,
    )
    values: dict[str, Any] = {
        "settings": {
            "model": "Qwen3, 4.2M parameters, hidden 256, 4 layers, vocab 4096, tied",
            "dtype": "float32",
            "completions": task.batch,
            "group_size": task.group_size,
            "prompt_tokens": f"{SHORTEST_PROMPT}-{LONGEST_PROMPT}",
            "max_tokens": task.max_tokens,
            "mean_tokens_uncut": args.mean_tokens,
            "temperature": task.temperature,
            "kl_coef": task.kl_coef,
            "optimizer_steps_per_rollout": 1,
            "loss": "clipped surrogate + k3 KL, token-mean over the step (TRL: dapo), advantages by group std",
            "threads": task.threads,
            "trl_micro_batch": args.trl_micro_batch,
            "rounds": args.rounds,
            "steps_per_turn": args.steps_per_turn,
        },
        "notes": [
            "trl is the ratio to the faster of model.generate and continuous batching in TRL",
            "TRL trains fastest with 4 completions in one pass: 1, 2, 8, 16 and 64 are slower",
            "our reward functions run in a pool of processes: the clock counts them (6 ms a step), CPU seconds do not",
        ],
    }
    ratios: dict[str, float] = {}
    with tempfile.TemporaryDirectory() as name:
        # Larger steps move the policy away from the reference, so that the check sees the KL term.
        canned = replace(task, canned=True, learning_rate=1e-4)
        for key, chosen in (("trl_train", canned), ("trl", task)):
            folder = Path(name) / key
            build_task(folder, chosen, mean_tokens=args.mean_tokens)
            sides = ["ours", "trl"] if chosen.canned else ["ours", "trl", "trl_continuous"]
            children = {side: start(side, folder, chosen, peer, args.trl_micro_batch) for side in sides}
            warm_up = NUM_CHECKED_STEPS + 1 if chosen.canned else 1
            first = {side: child.steps(warm_up) for side, child in children.items()}
            if chosen.canned:
                values["agreement"] = check_agreement(first["ours"], first["trl"])
                print(values["agreement"], flush=True)
            found, values["train" if chosen.canned else "step"] = measure(
                children, rounds=args.rounds, steps_per_turn=args.steps_per_turn
            )
            ratios[key] = min(found.values())
            for child in children.values():
                child.finish()
    report("grpo_step", ratios=ratios, memory_ratios={}, values=values, write=not args.no_write)


if __name__ == "__main__":
    main()
