"""What an indexer chooses, asked where its attention runs: against transformers' own choice of the whole sequence."""

from types import SimpleNamespace

import pytest
import torch
from family_checks import sequences
from family_table import FAMILIES, random_model

from shardwise.families import KeyChoice, defer_choices, indexers, lacks_choice
from shardwise.families.support import INDEXED

KINDS = ["deepseek_v32", "glm_moe_dsa", "axk2", "dots3_note_text", "hy_v4"]
LENGTH = 11


class Asked:
    """Counts the calls of an indexer."""

    def __init__(self, indexer):
        self.num_calls = 0
        indexer.register_forward_hook(self)

    def __call__(self, *_):
        self.num_calls += 1


def inputs(model):
    """Of the indexer of the first layer: two sequences."""
    generator = torch.Generator().manual_seed(3)
    config = model.config
    hidden = torch.randn(2, LENGTH, config.hidden_size, generator=generator)
    low_rank = torch.randn(2, LENGTH, config.q_lora_rank, generator=generator)
    angles = torch.rand(2, LENGTH, config.qk_rope_head_dim // 2, generator=generator).repeat(1, 1, 2)
    positions = torch.arange(LENGTH).expand(2, -1)
    return hidden, low_rank, (angles.cos(), angles.sin()), positions


def whole(tensor):
    return tensor


@pytest.mark.parametrize("at_once", [1, 4, LENGTH])
@pytest.mark.parametrize("family", KINDS)
def test_blocks_of_queries_choose_what_all_of_them_choose(monkeypatch, family, at_once):
    monkeypatch.setattr("shardwise.families.key_choice._QUERIES_AT_ONCE", at_once)
    model = random_model(family, FAMILIES[family])
    (indexer, *_) = indexers(model).values()
    hidden, low_rank, rotation, positions = inputs(model)
    causal = torch.ones(LENGTH, LENGTH, dtype=torch.bool).tril()[None]
    places = indexer(hidden, low_rank, rotation, causal, positions)
    expected = torch.zeros(2, LENGTH, LENGTH, dtype=torch.bool).scatter_(-1, places.long(), True) & causal
    assert int(expected[0, -1].sum()) == model.config.index_topk < LENGTH

    defer_choices(model)
    (layer, *_) = model.model.layers
    choice = layer.self_attn.indexer(hidden, low_rank, rotation, "not yet", positions, cache=None)
    assert choice.num_keys == model.config.index_topk
    chosen, keys = choice.of_whole(LENGTH, whole)
    assert torch.equal(chosen, expected)
    assert keys.shape == (2, LENGTH, model.config.index_head_dim)
    assert choice.key_bytes == 4 * model.config.index_head_dim


def test_layers_that_share_a_choice_ask_once_and_names_of_weights_stay():
    model = random_model("glm_moe_dsa", FAMILIES["glm_moe_dsa"])
    names = list(model.state_dict())
    ((path, indexer),) = indexers(model).items()
    assert path == "model.layers.0.self_attn.indexer"
    asked = Asked(indexer)
    defer_choices(model)
    assert list(model.state_dict()) == names
    choice = model.get_submodule(path)(*inputs(model)[:3], None, inputs(model)[3])
    assert asked.num_calls == 0
    first = choice.once(lambda choice: choice.of_whole(LENGTH, whole))
    assert choice.once(lambda _: pytest.fail("asked again")) is first
    assert asked.num_calls == 2, "of two sequences"


def test_a_layer_gives_its_choice_to_none_that_has_an_indexer_of_its_own():
    options = {"num_hidden_layers": 3, "indexer_types": ["full", "full", "shared"]}
    model = random_model("glm_moe_dsa", FAMILIES["glm_moe_dsa"] | options)
    defer_choices(model)
    given = []
    for layer in model.model.layers:
        layer.self_attn.register_forward_pre_hook(
            lambda _module, _args, kwargs: given.append(type(kwargs["prev_topk_indices"])), with_kwargs=True
        )
        layer.self_attn.forward = lambda hidden_states, **_: (hidden_states, None, KeyChoice(torch.nn.Module(), {}))
    model(torch.arange(3, 9)[None])
    assert given == [type(None), type(None), KeyChoice]


def test_an_attention_that_hears_nothing_of_its_indexer_is_told_from_others():
    attention = torch.nn.Module()
    attention.config = SimpleNamespace(layer_types=["full_attention", INDEXED])
    attention.layer_idx = 0
    assert not lacks_choice(attention, None)
    attention.layer_idx = 1
    assert not lacks_choice(attention, KeyChoice(torch.nn.Module(), {}))
    assert lacks_choice(attention, None)
    assert lacks_choice(attention, torch.zeros(1, 2, 3))
    attention.config = None
    assert not lacks_choice(attention, None)


def test_sequences_are_longer_than_what_is_chosen_in_the_tests_of_families():
    for family in KINDS:
        assert FAMILIES[family]["index_topk"] < min(len(tokens) for tokens in sequences())
