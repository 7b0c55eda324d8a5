"""From nothing to a policy improved by reinforcement learning, in minutes, offline: the real recipes on a toy task."""

import os
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from shutil import which

import torch

from shardwise.config import EvalConfig, RLConfig, SFTConfig
from shardwise.controller.base import WorkerGroup
from shardwise.data import ProblemFiles, arithmetic_problems, build_model_folder, train_tokenizer
from shardwise.durable import write_json_atomic
from shardwise.observability import print_table
from shardwise.recipes.checkpointing.checkpoints import latest_hf_folder
from shardwise.recipes.checkpointing.writer_lock import no_place
from shardwise.recipes.evaluate import evaluate
from shardwise.recipes.rl import train as train_rl
from shardwise.recipes.sft import train as train_sft
from shardwise.recipes.stopping import Stopped

NUM_HELD_OUT = 512
SFT_STEPS = 130
RL_STEPS = 90
MAX_RESPONSE_TOKENS = 16


def default_num_ranks() -> int:
    """Returns 2, since two ranks show more than one; on a machine with a single accelerator 1."""
    return min(2, torch.accelerator.device_count()) if torch.accelerator.is_available() else 2


def quickstart(output_dir: Path, group: WorkerGroup, *, seed: int) -> None:
    """Makes problems, a tokenizer and a random model; trains with SFT, then with GRPO; measures before, between and
    after.

    Leaves in output_dir: summary.json, the files of the RL run (see Run), and sft/ with those of the SFT run.
    """
    start = time.perf_counter()
    if (output_dir / "data").exists():
        print(
            f"{output_dir} holds an earlier quickstart: makes its data and model anew and moves its runs aside",
            flush=True,
        )
    try:
        output_dir.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise no_place(output_dir, "--output-dir", error) from None
    print("1/4  making addition problems, a tokenizer and a small random Qwen3", flush=True)
    files = arithmetic_problems(output_dir / "data", seed=seed, num_held_out=NUM_HELD_OUT, worked=True)
    tokenizer = train_tokenizer(files.sft_train.read_text(encoding="utf-8").splitlines(), vocab_size=320)
    model = output_dir / "model"
    build_model_folder(model, tokenizer=tokenizer, seed=seed)
    accuracy = {"untrained": _accuracy(model, files, group, output_dir / "eval" / "untrained")}

    print("2/4  supervised fine-tuning on worked answers", flush=True)
    with _beginning_anew():
        train_sft(sft_config(model, files, output_dir / "sft", seed=seed), group)
    group.call("close")
    after_sft = latest_hf_folder(str(output_dir / "sft"))
    accuracy["sft"] = _accuracy(Path(after_sft), files, group, output_dir / "eval" / "sft")

    print("3/4  reinforcement learning (GRPO) on the answers alone", flush=True)
    with _beginning_anew():
        train_rl(rl_config(Path(after_sft), files, output_dir, seed=seed), group)
    group.call("close")
    accuracy["rl"] = _accuracy(output_dir, files, group, output_dir / "eval" / "rl")

    seconds = time.perf_counter() - start
    write_json_atomic(output_dir / "summary.json", {"accuracy": accuracy, "seconds": round(seconds, 1)})
    print(f"4/4  done in {seconds:.0f} s", flush=True)
    print_table(
        f"Greedy accuracy on {NUM_HELD_OUT} held-out problems",
        ["policy", "accuracy"],
        [[name, f"{value:.1%}"] for name, value in accuracy.items()],
    )
    bin_folder = "" if which("shardwise") else f"{os.path.relpath(Path(sys.executable).parent)}/"
    print(f'Talk to it:   {bin_folder}shardwise generate {output_dir} --prompt "33+44="')
    print("              An answer such as 07 77 is the sum of the ones, which helps to carry, and then the sum.")
    print(f"Look at it:   {bin_folder}tensorboard --logdir {output_dir}")


@contextmanager
def _beginning_anew() -> Iterator[None]:
    """Tells who stops a run in it that the quickstart goes on with none."""
    try:
        yield
    except Stopped as stopped:
        raise Stopped(stopped.reason, "the same command begins anew", stopped.code) from None


def sft_config(model: Path, files: ProblemFiles, output_dir: Path, *, seed: int) -> SFTConfig:
    """Makes the SFT config: enough steps to learn the form of an answer, too few to be right most of the time.

    The learning rate stays constant: decayed, it would leave the policy in a valley too narrow for the steps of RL."""
    return SFTConfig.parse(
        {
            "model": {"path": str(model)},
            "data": {
                "train_files": str(files.sft_train),
                "validation_files": str(files.sft_validation),
                "max_sequence_tokens": 64,
            },
            "trainer": {
                "output_dir": str(output_dir),
                "resume": "never",
                "total_steps": SFT_STEPS,
                "batch_size": 128,
                "learning_rate": 1e-3,
                "warmup_steps": 10,
                "weight_decay": 0.1,
                "seed": seed,
            },
        },
        origin="quickstart",
    )


def rl_config(model: Path, files: ProblemFiles, output_dir: Path, *, seed: int) -> RLConfig:
    """Makes the RL config: GRPO, with one optimizer step for each rollout batch. Without division by the group's
    standard deviation, one of three seeds fell back from 0.76 to 0.52 in the last steps."""
    return RLConfig.parse(
        {
            "model": {"path": str(model)},
            "data": {
                "train_files": str(files.rl_train),
                "validation_files": str(files.rl_validation),
                "max_prompt_tokens": 32,
            },
            "rollout": {
                "num_prompts": 32,
                "group_size": 16,
                "max_response_tokens": 32,
                "max_concurrent_sequences": 256,
            },
            "reward": {"functions": "shardwise.rewards.math:number_match"},
            "algorithm": {"advantage": "grpo"},
            "trainer": {
                "output_dir": str(output_dir),
                "resume": "never",
                "total_steps": RL_STEPS,
                "validate_every_steps": 10,
                "learning_rate": 1.5e-4,
                "warmup_steps": 5,
                "seed": seed,
            },
        },
        origin="quickstart",
    )


def _accuracy(model: Path, files: ProblemFiles, group: WorkerGroup, output_dir: Path) -> float:
    """Held-out greedy accuracy; the samples go to `output_dir`."""
    config = EvalConfig.parse(
        {
            "model": {"path": str(model)},
            "data": {"validation_files": str(files.rl_validation), "max_prompt_tokens": 32},
            "rollout": {"max_response_tokens": MAX_RESPONSE_TOKENS, "max_concurrent_sequences": 512},
            "reward": {"functions": "shardwise.rewards.math:number_match"},
            "eval": {"output_dir": str(output_dir)},
        },
        origin="quickstart",
    )
    accuracy = evaluate(config, group)["all"]["greedy_accuracy"]
    group.call("close")
    return accuracy
