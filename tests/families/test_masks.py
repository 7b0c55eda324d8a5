"""What transformers' masks become: windows and chunks as numbers, anything else refused."""

from types import SimpleNamespace

import pytest
import torch
from family_table import FAMILIES, random_model
from torch import nn
from transformers import AttentionMaskInterface, Qwen3Config
from transformers.masking_utils import create_causal_mask, create_chunked_causal_mask, create_sliding_window_causal_mask
from transformers.models.gemma3.modeling_gemma3 import get_block_sequence_ids_for_mask

from shardwise.families import attention_span, image_blocks, is_own_mask, mask_as_span, shows_blocks

NAME = "span_of_a_test"


@pytest.fixture
def mask_by():
    """A mask as models make it, of this many tokens of one pack."""
    AttentionMaskInterface.register(NAME, mask_as_span)
    config = Qwen3Config(use_sliding_window=True, sliding_window=5, max_window_layers=0)
    config.attention_chunk_size = 3
    config._attn_implementation = NAME
    positions = torch.tensor([[0, 1, 2, 3, 0, 1, 2, 3, 4, 5]])

    def make(function, *, layer_type="sliding_attention", **options):
        config.layer_types = [layer_type] * config.num_hidden_layers
        return function(
            config=config,
            inputs_embeds=torch.zeros(1, 10, 2),
            attention_mask=None,
            past_key_values=None,
            position_ids=positions,
            **options,
        )

    return make


def layer(layer_type: str) -> nn.Module:
    module = nn.Module()
    module.config = SimpleNamespace(layer_types=[layer_type], attention_chunk_size=3)
    module.layer_idx = 0
    return module


def test_a_window_known_from_the_mask_alone_is_the_window(mask_by):
    mask = mask_by(create_sliding_window_causal_mask)
    assert mask == 5
    assert attention_span(layer("sliding_attention"), mask, None) == (5, None)


def test_a_window_given_by_keyword_holds_where_no_mask_is_made(mask_by):
    assert mask_by(create_causal_mask) is None
    assert attention_span(layer("sliding_attention"), None, 4) == (4, None)
    assert attention_span(layer("full_attention"), None, None) == (None, None)


def test_layers_with_an_indexer_cut_a_mask_that_says_nothing(mask_by):
    mask = mask_by(create_causal_mask, layer_type="indexed_attention", allow_is_causal_skip=False)
    part = mask[:, 0, :, :]
    assert not any(map(is_own_mask, (mask, part)))
    assert attention_span(layer("indexed_attention"), part, None) == (None, None)


def test_a_window_stays_where_a_model_cuts_its_masks_to_fewer_queries(mask_by):
    mask = mask_by(create_sliding_window_causal_mask)
    assert attention_span(layer("sliding_attention"), mask[:, :, -1:, :], None) == (5, None)


def test_chunks_are_no_windows(mask_by):
    assert attention_span(layer("chunked_attention"), mask_by(create_chunked_causal_mask), None) == (None, 3)


@pytest.mark.parametrize("overlay", ["or_mask_function", "and_mask_function"])
def test_what_a_family_adds_to_a_mask_is_not_lost(mask_by, overlay):
    mask = mask_by(create_sliding_window_causal_mask, **{overlay: lambda *_: True})
    assert is_own_mask(mask)
    assert is_own_mask(torch.zeros(1, 1, 10, 10))
    assert not is_own_mask(mask_by(create_sliding_window_causal_mask))
    assert not is_own_mask(None)


def test_images_are_numbered_by_their_tokens_in_every_row():
    is_image = torch.tensor([[1, 1, 0, 1, 0, 0], [0, 1, 1, 1, 0, 1], [0] * 6]).bool()
    expected = [[0, 0, -1, 1, -1, -1], [-1, 0, 0, 0, -1, 1], [-1] * 6]
    assert image_blocks(is_image).tolist() == expected
    assert [image_blocks(row).tolist() for row in is_image] == expected
    kinds = is_image.int()
    assert torch.equal(image_blocks(is_image), get_block_sequence_ids_for_mask(kinds))


def test_layers_of_gemma_4_without_a_window_show_an_image_as_words():
    layers = {
        family: random_model(family, FAMILIES[family]).get_decoder().layers for family in ("gemma3", "gemma4", "qwen3")
    }
    found = {family: [shows_blocks(layer.self_attn) for layer in own] for family, own in layers.items()}
    assert found == {"gemma3": [True, True], "gemma4": [True, False] * 2, "qwen3": [True, True]}
