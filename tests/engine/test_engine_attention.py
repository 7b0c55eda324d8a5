from copy import deepcopy

import pytest
import torch
from tiny_models import FAMILIES, tiny_model
from torch import nn
from transformers import AutoModelForCausalLM

from shardwise.config import ModelError
from shardwise.engine.attention import PACKED_ATTENTION, PackedCall, _packed_attention, register_packed_attention
from shardwise.ops import PackedLayout

LENGTHS = [11, 6, 6, 2, 1]


def packed_model(eager):
    register_packed_attention()
    model = AutoModelForCausalLM.from_config(deepcopy(eager.config), attn_implementation=PACKED_ATTENTION)
    model.load_state_dict(eager.state_dict())
    return model


@pytest.mark.parametrize("family", FAMILIES)
def test_packed_logits_and_gradients_equal_each_sequence_alone(family):
    """The registered attention reads scale, window and softcap from each family's layers (traps 4 and 6)."""
    eager = tiny_model(family)
    model = packed_model(eager)
    torch.manual_seed(0)
    sequences = [torch.randint(3, 100, (length,)) for length in LENGTHS]
    layout = PackedLayout.from_cu_seqlens(
        torch.tensor([0, *LENGTHS]).cumsum(0).to(torch.int32), device=torch.device("cpu")
    )
    call = PackedCall(layout)
    packed_logits = model(
        input_ids=torch.cat(sequences)[None],
        position_ids=torch.cat([torch.arange(length) for length in LENGTHS])[None],
        use_cache=False,
        packed=call,
    ).logits[0]
    assert call.num_attention_calls == model.config.num_hidden_layers
    alone = torch.cat([eager(input_ids=tokens[None], use_cache=False).logits[0] for tokens in sequences])
    torch.testing.assert_close(packed_logits, alone, rtol=0, atol=2e-5)
    weights = torch.randn_like(alone)
    (packed_logits * weights).sum().backward()
    (alone * weights).sum().backward()
    for (name, ours), theirs in zip(model.named_parameters(), eager.parameters(), strict=True):
        error = (ours.grad - theirs.grad).abs().max()
        assert error < 2e-5 * theirs.grad.abs().max(), (name, float(error))


def test_forward_without_a_layout_is_an_error_and_not_full_attention():
    model = packed_model(tiny_model("qwen3"))
    with pytest.raises(ModelError, match="Qwen3Attention is not supported: it does not pass keyword arguments on"):
        model(input_ids=torch.tensor([[5, 6, 7]]), use_cache=False)


@pytest.mark.parametrize(
    ("mask", "options", "message"),
    [(None, {"s_aux": torch.ones(2)}, "attention sinks"), (torch.zeros(3, 3), {}, "an attention mask of its own")],
)
def test_what_packed_attention_would_ignore_is_refused(mask, options, message):
    heads = torch.zeros(1, 2, 3, 4)
    layout = PackedLayout.from_cu_seqlens(torch.tensor([0, 3], dtype=torch.int32), device=torch.device("cpu"))
    with pytest.raises(ModelError, match=message):
        _packed_attention(nn.Module(), heads, heads, heads, mask, packed=PackedCall(layout), **options)
