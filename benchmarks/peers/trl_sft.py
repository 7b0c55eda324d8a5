"""TRL's SFTTrainer on a folder's model and rows, in lockstep. Needs trl, peft and datasets.

Settings that cost time or memory for nothing here are off: gradient checkpointing, bf16, logging integrations, saving.
The fused AdamW and the fused language-model head are TRL's defaults.
"""

import argparse
import json
import tempfile
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoTokenizer, PrinterCallback, TrainerCallback
from trl import SFTConfig, SFTTrainer

from benchmarks.peers.lockstep import Pacer


class TakeTurns(TrainerCallback):
    """Blocks after every step that ends a turn."""

    def __init__(self, pacer: Pacer) -> None:
        self._pacer = pacer
        self.tokens_of_step: list[int] = []
        self._loss = 0.0

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if not self._pacer.ready():
            control.should_training_stop = True

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        losses = [entry["loss"] for entry in state.log_history[-1:] if "loss" in entry]
        if not self._pacer.step_done(self.tokens_of_step[state.global_step - 1], losses[0] if losses else 0.0):
            control.should_training_stop = True


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--batch", type=int, required=True, help="rows of one optimizer step")
    parser.add_argument("--seq", type=int, required=True)
    parser.add_argument("--threads", type=int, required=True)
    parser.add_argument("--steps", type=int, required=True)
    parser.add_argument("--mode", choices=["padded", "packed", "padding_free"], default="padded")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    pacer = Pacer()
    turns = TakeTurns(pacer)
    model = AutoModelForCausalLM.from_pretrained(args.folder, dtype=torch.float32, attn_implementation="sdpa")
    rows = json.loads((args.folder / "rows.json").read_text())
    with tempfile.TemporaryDirectory() as output:
        trainer = SFTTrainer(
            model=model,
            args=SFTConfig(
                output_dir=output,
                use_cpu=True,
                bf16=False,
                report_to="none",
                save_strategy="no",
                max_steps=args.steps,
                per_device_train_batch_size=args.batch,
                gradient_accumulation_steps=1,
                learning_rate=2e-5,
                lr_scheduler_type="constant",
                max_grad_norm=1.0,
                max_length=None if args.mode == "padding_free" else args.seq,
                packing=args.mode == "packed",
                padding_free=args.mode == "padding_free",
                gradient_checkpointing=False,
                dataloader_pin_memory=False,
                train_sampling_strategy="sequential",
                logging_steps=1,
                disable_tqdm=True,
            ),
            train_dataset=Dataset.from_list([{"input_ids": row} for row in rows]),
            processing_class=AutoTokenizer.from_pretrained(args.folder),
            callbacks=[turns],
        )
        trainer.remove_callback(PrinterCallback)
        assert not trainer.model.is_gradient_checkpointing
        lengths = [len(row) for row in trainer.train_dataset["input_ids"]]
        turns.tokens_of_step = [
            sum(lengths[first : first + args.batch]) for first in range(0, len(lengths), args.batch)
        ]
        trainer.train()


if __name__ == "__main__":
    main()
