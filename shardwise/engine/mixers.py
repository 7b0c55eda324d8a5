"""Layers that carry a state from token to token (linear attention, state spaces, short convolutions) over packed
sequences: transformers' own code for them, one sequence at a time.

Shapes: t tokens of a pack, D hidden size.
"""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import ActivationWrapper

from shardwise.config import ModelError
from shardwise.engine.attention import PackedCall
from shardwise.families import DROPS_KEYWORDS


class PackedMixer(ActivationWrapper):
    """Applies the module it wraps to every sequence alone, so that no state passes on to the next one."""

    @torch.compiler.disable
    def forward(self, hidden_states: Tensor, *, packed: PackedCall | None = None, **kwargs: Any) -> Tensor:
        """[1, t, D] -> the same shape. Runs of neighboring sequences of one length are one batch."""
        mixer = self._checkpoint_wrapped_module
        if packed is None:
            raise ModelError(f"The family of {type(mixer).__name__} is not supported: it {DROPS_KEYWORDS}")
        packed.num_mixer_calls += 1
        runs = packed.layout.runs
        outputs = []
        for (count, length), tokens in zip(
            runs, hidden_states[0].split([count * length for count, length in runs]), strict=True
        ):
            out: Tensor = mixer(hidden_states=tokens.unflatten(0, (count, length)), **kwargs)
            outputs.append(out.flatten(0, 1))
        return torch.cat(outputs)[None]


def pack_mixers(model: nn.Module, mixers: Mapping[str, nn.Module]) -> None:
    """Puts the modules at these paths into PackedMixer, in place."""
    for path, mixer in mixers.items():
        model.set_submodule(path, PackedMixer(mixer))
