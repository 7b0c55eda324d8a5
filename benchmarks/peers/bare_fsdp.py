"""What an expert writes by hand with fully_shard: the other side of fsdp_overhead.

Rows of equal length, so that no token is padding and sdpa needs no mask; every decoder layer and the root are FSDP
units; fused AdamW; gradient clipping.
"""

from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from transformers import AutoModelForCausalLM


class BareTraining:
    """A sharded transformers model and its optimizer, on the default process group."""

    def __init__(self, folder: Path, *, param_dtype: torch.dtype, learning_rate: float) -> None:
        """Masters, reduction and optimizer are float32; layers compute in `param_dtype`."""
        self._model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="sdpa")
        precision = MixedPrecisionPolicy(param_dtype=param_dtype, reduce_dtype=torch.float32)
        for layer in self._model.model.layers:
            fully_shard(layer, mp_policy=precision)
        fully_shard(self._model, mp_policy=precision)
        self._model.train()
        self._optimizer = torch.optim.AdamW(
            self._model.parameters(), lr=learning_rate, betas=(0.9, 0.95), weight_decay=0.0, fused=True
        )

    def step(self, rows: Tensor) -> float:
        """One optimizer step on this rank's rows [B, L]; every rank has as many. Returns this rank's mean loss."""
        logits = self._model(input_ids=rows, use_cache=False).logits
        loss = F.cross_entropy(logits[:, :-1].flatten(0, 1).float(), rows[:, 1:].flatten())
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(self._model.parameters(), 1.0)
        assert isinstance(norm, DTensor)
        self._optimizer.step()
        self._optimizer.zero_grad(set_to_none=True)
        return loss.item()
