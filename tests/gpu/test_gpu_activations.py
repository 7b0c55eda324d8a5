"""What layers keep between forward and backward, in bytes of the device."""

from collections import Counter

import pytest
import torch
from small_gpu_model import VOCAB, allocated, build, loss_of, packed, save_model
from tiny_models import random_samples
from torch.utils._python_dispatch import TorchDispatchMode

NUM_LAYERS, HIDDEN, LENGTH, NUM_SEQUENCES = 12, 256, 512, 64
LAYER_BYTES = 2 * HIDDEN * LENGTH * NUM_SEQUENCES
"""Of a layer's input in bfloat16: 16 MiB."""


def peak_bytes(folder, device, *options):
    """Above what is there before it, of a forward and backward pass that adds to gradients."""
    engine = build(folder, device, "param_dtype=bfloat16", "activation_checkpointing=full", *options)
    step = packed(random_samples([LENGTH] * NUM_SEQUENCES, vocab=VOCAB), max_tokens=LENGTH * NUM_SEQUENCES)
    loss_of(engine, step)  # leaves gradients, which else would grow while inputs go, and the workspaces of libraries
    before = allocated()
    torch.cuda.reset_peak_memory_stats()
    loss_of(engine, step)
    return torch.cuda.memory_stats()["requested_bytes.all.peak"] - before


def test_offload_takes_the_inputs_of_all_layers_but_two_off_the_peak(tmp_path, device):
    """Without it the peak holds the input of every layer. With it there is that of the layer at work, and less than
    another one of weights and gradients on their way, which at the other peak (the last layer's backward, or the loss)
    are none or few. It cannot save more than all of them."""
    folder = save_model(tmp_path, num_hidden_layers=NUM_LAYERS)
    kept = peak_bytes(folder, device)
    offloaded = peak_bytes(folder, device, "activation_offload=true")
    assert kept >= NUM_LAYERS * LAYER_BYTES
    print(f"saved {(kept - offloaded) / LAYER_BYTES:.2f} of {NUM_LAYERS} inputs")
    assert NUM_LAYERS - 2 <= (kept - offloaded) / LAYER_BYTES <= NUM_LAYERS


class Operations(TorchDispatchMode):
    """Counts the operations that are really computed."""

    def __init__(self):
        super().__init__()
        self.counts = Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.counts[func] += 1
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize(("kind", "times"), [("none", 1), ("full", 2), ("selective", 1)])
def test_variable_length_attention_is_computed_again_by_full_checkpointing_alone(folder, device, kind, times):
    options = ["param_dtype=bfloat16", "attention_implementation=varlen", f"activation_checkpointing={kind}"]
    engine = build(folder, device, *options)
    with Operations() as operations:
        loss_of(engine, packed(random_samples([300, 64], vocab=VOCAB), max_tokens=512))
    assert operations.counts[torch.ops.torch_attn._varlen_attn.default] == 4 * times
