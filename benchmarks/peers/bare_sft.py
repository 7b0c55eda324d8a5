"""A plain PyTorch training loop on a folder's model and rows, in lockstep: the floor that any trainer starts from.

Right-padded batches, sdpa, fused AdamW, gradient clipping.
"""

import argparse
import json
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM

from benchmarks.peers.lockstep import Pacer


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--batch", type=int, required=True, help="sequences of one optimizer step")
    parser.add_argument("--threads", type=int, required=True)
    parser.add_argument("--mask", action=argparse.BooleanOptionalAction, default=True, help="pass attention_mask")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    pacer = Pacer()
    model = AutoModelForCausalLM.from_pretrained(args.folder, dtype=torch.float32, attn_implementation="sdpa").train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-5, weight_decay=0.0, fused=True)
    rows = json.loads((args.folder / "rows.json").read_text())
    going, step = pacer.ready(), 0
    while going:
        batch = rows[step * args.batch : (step + 1) * args.batch]
        width = max(map(len, batch))
        input_ids = torch.tensor([row + [0] * (width - len(row)) for row in batch])
        mask = torch.arange(width) < torch.tensor([len(row) for row in batch])[:, None]
        # Padding lies on the right, so the causal mask alone already keeps it out of sight.
        attention_mask = mask.long() if args.mask else None
        loss = model(
            input_ids=input_ids,
            attention_mask=attention_mask,
            labels=input_ids.masked_fill(~mask, -100),
            use_cache=False,
        ).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        step += 1
        going = pacer.step_done(int(mask.sum()), loss.item())


if __name__ == "__main__":
    main()
