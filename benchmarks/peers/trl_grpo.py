"""TRL's GRPOTrainer on a folder's task, in lockstep. Needs trl, peft and datasets.

Settings that cost time or memory for nothing here are off: gradient checkpointing, bf16, logging integrations, saving.
The fused AdamW and the chunked language-model head are TRL's defaults. With one optimizer step for each rollout TRL
needs no old logprobs, and computes none. Canned completions come in through rollout_func, its documented hook.
"""

import argparse
import statistics
import tempfile
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoTokenizer, PrinterCallback, TrainerCallback
from trl import GRPOConfig, GRPOTrainer

from benchmarks.peers.grpo_task import LONGEST_PROMPT, GrpoTask, canned_completions, prompt_texts, reward_of
from benchmarks.peers.lockstep import Pacer

FIGURES = {"grad_norm": "grad_norm", "kl": "kl", "reward": "reward"}
PAGE_TOKENS = 32


class TakeTurns(TrainerCallback):
    """Judges completions, and blocks after every step that ends a turn. Losses and FIGURES are told one step late,
    because the trainer logs after it."""

    def __init__(self, pacer: Pacer) -> None:
        self._pacer = pacer
        self._num_tokens = 0
        self._completion_tokens: list[int] = []

    def reward(self, completions: list[str], completion_ids: list[list[int]], **columns: Any) -> list[float]:
        """The reward function, which sees every completion of a step."""
        self._completion_tokens = [len(ids) for ids in completion_ids]
        return [reward_of(text) for text in completions]

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if not self._pacer.ready():
            control.should_training_stop = True

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        logged = state.log_history[-1] if state.log_history else {}
        figures = {name: float(logged.get(key, 0.0)) for name, key in FIGURES.items()}
        figures["completion_tokens"] = statistics.mean(self._completion_tokens)
        num_tokens = int(state.num_input_tokens_seen) - self._num_tokens  # prompts and completions, without padding
        self._num_tokens += num_tokens
        if not self._pacer.step_done(num_tokens, float(logged.get("loss", 0.0)), **figures):
            control.should_training_stop = True


def cache_of(task: GrpoTask) -> dict[str, Any]:
    """A paged cache with room for the whole batch; by default it takes half of the machine's memory, anew each step."""
    pages_per_row = -(-(LONGEST_PROMPT + task.max_tokens) // PAGE_TOKENS)
    return {"page_size": PAGE_TOKENS, "num_blocks": task.batch * pages_per_row, "max_batch_tokens": 512}


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
    turns = TakeTurns(pacer)
    model = AutoModelForCausalLM.from_pretrained(args.folder, dtype=torch.float32, attn_implementation="sdpa")
    with tempfile.TemporaryDirectory() as output:
        trainer = GRPOTrainer(
            model=model,
            reward_funcs=turns.reward,
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
                transformers_continuous_batching_config=cache_of(task) if args.continuous_batching else None,
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
            callbacks=[turns],
        )
        trainer.remove_callback(PrinterCallback)
        assert not trainer.model.is_gradient_checkpointing
        trainer.train()


if __name__ == "__main__":
    main()
