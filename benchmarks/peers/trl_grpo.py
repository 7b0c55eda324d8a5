"""TRL's GRPOTrainer on a folder's task, in lockstep. Needs trl, peft and datasets.

Settings that cost time or memory for nothing here are off: gradient checkpointing, bf16, logging integrations, saving.
The fused AdamW and the chunked language-model head are TRL's defaults. With one optimizer step for each rollout TRL
needs no old logprobs, and computes none. Canned completions come in through rollout_func, its documented hook.
"""

import argparse
import tempfile
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoTokenizer, PrinterCallback, TrainerCallback
from trl import GRPOConfig, GRPOTrainer

from benchmarks.peers.grpo_task import GrpoTask, canned_completions, prompt_texts, reward_of
from benchmarks.peers.lockstep import Pacer

FIGURES = {"grad_norm": "grad_norm", "kl": "kl", "reward": "reward", "completion_tokens": "completions/mean_length"}


class TakeTurns(TrainerCallback):
    """Blocks after every step that ends a turn. What it tells of a step is logged one step late."""

    def __init__(self, pacer: Pacer) -> None:
        self._pacer = pacer
        self._num_tokens = 0

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if not self._pacer.ready():
            control.should_training_stop = True

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        logged = state.log_history[-1] if state.log_history else {}
        figures = {name: float(logged.get(key, 0.0)) for name, key in FIGURES.items()}
        num_tokens = int(state.num_input_tokens_seen) - self._num_tokens  # prompts and completions, without padding
        self._num_tokens += num_tokens
        if not self._pacer.step_done(num_tokens, float(logged.get("loss", 0.0)), **figures):
            control.should_training_stop = True


def rewards_of(completions: list[str], **columns: Any) -> list[float]:
    return [reward_of(text) for text in completions]


def canned_rollouts(folder: Path, group_size: int) -> Any:
    """A rollout_func that returns the folder's completions of each prompt, in order."""
    completions = canned_completions(folder)

    def rollout(prompts: list[str], trainer: Any) -> dict[str, Any]:
        return {
            "prompt_ids": trainer.processing_class(text=prompts)["input_ids"],
            "completion_ids": [completions[prompt][place % group_size] for place, prompt in enumerate(prompts)],
            "logprobs": None,
        }

    return rollout


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--micro-batch", type=int, required=True, help="completions of one forward and backward pass")
    parser.add_argument("--continuous-batching", action="store_true")
    args = parser.parse_args()
    task = GrpoTask.load(args.folder)
    torch.set_num_threads(task.threads)
    pacer = Pacer()
    model = AutoModelForCausalLM.from_pretrained(args.folder, dtype=torch.float32, attn_implementation="sdpa")
    with tempfile.TemporaryDirectory() as output:
        trainer = GRPOTrainer(
            model=model,
            reward_funcs=rewards_of,
            args=GRPOConfig(
                output_dir=output,
                use_cpu=True,
                bf16=False,
                report_to="none",
                save_strategy="no",
                max_steps=1_000_000,
                per_device_train_batch_size=args.micro_batch,
                gradient_accumulation_steps=task.batch // args.micro_batch,
                num_generations=task.group_size,
                max_completion_length=task.max_tokens,
                temperature=task.temperature,
                shuffle_dataset=False,
                use_transformers_continuous_batching=args.continuous_batching,
                beta=task.kl_coef,
                loss_type="dapo",
                scale_rewards="group",
                learning_rate=task.learning_rate,
                lr_scheduler_type="constant",
                weight_decay=0.0,
                max_grad_norm=1.0,
                gradient_checkpointing=False,
                disable_dropout=True,
                dataloader_pin_memory=False,
                logging_steps=1,
                disable_tqdm=True,
            ),
            train_dataset=Dataset.from_list([{"prompt": text} for text in prompt_texts(args.folder)]),
            processing_class=AutoTokenizer.from_pretrained(args.folder),
            rollout_func=canned_rollouts(args.folder, task.group_size) if task.canned else None,
            callbacks=[TakeTurns(pacer)],
        )
        trainer.remove_callback(PrinterCallback)
        assert not trainer.model.is_gradient_checkpointing
        trainer.train()


if __name__ == "__main__":
    main()
