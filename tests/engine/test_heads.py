"""The heads as modules on plain tensors, against the models of transformers that they stand for."""

import pytest
import torch
from tiny_models import tiny_model
from transformers import AutoModelForSequenceClassification, AutoModelForTokenClassification, GPTNeoXConfig, OPTConfig

from shardwise.engine.heads import LogprobHead, ValueHead, Wanted, fresh_head, make_head
from shardwise.engine.token_slice import ScoredTokens, TokenSlice
from shardwise.types import TokenBatch

CPU = torch.device("cpu")
LENGTHS = [7, 4, 1]
CLASSES = {"token_values": AutoModelForTokenClassification, "sequence_scores": AutoModelForSequenceClassification}


def value_model(family, name):
    """Float32, eager, with a head that is not zero."""
    config = tiny_model(family).config
    config.num_labels = 1
    torch.manual_seed(3)
    return CLASSES[name].from_config(config, dtype=torch.float32, attn_implementation="eager").eval()


def sequences():
    generator = torch.Generator().manual_seed(5)
    return [torch.randint(3, 100, (length,), generator=generator) for length in LENGTHS]


def batch_of(tokens, loss_mask):
    return TokenBatch(
        input_ids=tokens,
        position_ids=torch.arange(len(tokens)),
        cu_seqlens=torch.tensor([0, len(tokens)], dtype=torch.int32),
        loss_mask=loss_mask,
        sample_index=[0],
    )


def values_of(model, name, tokens):
    """[T] values by our head from the backbone's states."""
    batch = batch_of(tokens, torch.arange(len(tokens)) > 0)
    head = make_head(model, name)
    piece = TokenSlice.of(batch, head.scored, ulysses=None, device=CPU)
    hidden = model.base_model(input_ids=tokens[None], use_cache=False).last_hidden_state[0]
    found = head(hidden, piece.states, piece.targets, Wanted(temperature=0.5, entropy=True))
    assert found.keys() == {"values"}
    return piece.assemble(found["values"], None)


@pytest.mark.parametrize("family", ["qwen3", "llama"])
def test_value_of_a_token_is_the_logit_of_the_token_before_it(family):
    """The value of token s is known before s is: transformers' token classifier puts it on s - 1."""
    model = value_model(family, "token_values")
    for tokens in sequences():
        values = values_of(model, "token_values", tokens)
        logits = model(input_ids=tokens[None], use_cache=False).logits[0, :, 0]
        torch.testing.assert_close(values, torch.cat([torch.zeros(1), logits[:-1]]), rtol=0, atol=1e-5)
        assert len(tokens) == 1 or logits.abs().max() > 0.01


@pytest.mark.parametrize("family", ["qwen3", "llama"])
def test_score_of_a_sequence_is_the_pooled_logit_on_its_last_token(family):
    """transformers pools the logit of the last token that is no padding; none of the tokens is padding here."""
    model = value_model(family, "sequence_scores")
    for tokens in sequences():
        values = values_of(model, "sequence_scores", tokens)
        pooled = model(input_ids=tokens[None], use_cache=False).logits[0, 0]
        expected = torch.zeros(len(tokens))
        expected[-1] = pooled
        torch.testing.assert_close(values, expected, rtol=0, atol=1e-5)
        assert pooled.abs() > 0.001


def test_gradients_of_a_value_head_equal_those_of_the_model_of_transformers():
    tokens = sequences()[0]
    ours, theirs = (value_model("llama", "token_values") for _ in range(2))
    weights = torch.linspace(-1, 1, len(tokens))
    (values_of(ours, "token_values", tokens) * weights).sum().backward()
    (theirs(input_ids=tokens[None], use_cache=False).logits[0, :-1, 0] * weights[1:]).sum().backward()
    for (name, mine), other in zip(ours.named_parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(mine.grad, other.grad, rtol=1e-4, atol=1e-6, msg=name)
    assert ours.score.weight.grad.abs().max() > 0.01


def test_bfloat16_states_are_projected_in_float32():
    """A value of 100 in bfloat16 would be off by up to 0.25."""
    projection = torch.nn.Linear(64, 1, dtype=torch.bfloat16)
    torch.manual_seed(0)
    hidden = torch.randn(5, 64).bfloat16()
    states = torch.tensor([0, 2, 4])
    values = ValueHead(projection, ScoredTokens.LAST)(hidden, states, states, Wanted())["values"]
    expected = hidden[states].double() @ projection.weight[0].double() + projection.bias.double()
    assert values.dtype == torch.float32
    torch.testing.assert_close(values.double(), expected, rtol=0, atol=1e-6)


def test_logprob_head_reads_the_transform_and_the_projection_of_its_family():
    """Gemma 2 bends its logits with a softcap of 2."""
    model = tiny_model("gemma2").eval()
    tokens = sequences()[0]
    head = make_head(model, "logprobs")
    assert isinstance(head, LogprobHead)
    piece = TokenSlice.of(batch_of(tokens, torch.arange(7) > 2), head.scored, ulysses=None, device=CPU)
    hidden = model.base_model(input_ids=tokens[None], use_cache=False).last_hidden_state[0]
    found = head(hidden, piece.states, piece.targets, Wanted(temperature=0.7, entropy=True, states=True))
    assert found.keys() == {"logprobs", "entropy", "states"}
    logs = (model(input_ids=tokens[None], use_cache=False).logits[0].double() / 0.7).log_softmax(-1)
    assert model(input_ids=tokens[None], use_cache=False).logits.abs().max() < 2
    expected = torch.stack([logs[token - 1, tokens[token]] for token in range(3, 7)])
    torch.testing.assert_close(found["logprobs"].double(), expected, rtol=0, atol=1e-5)
    torch.testing.assert_close(found["entropy"].double(), -(logs.exp() * logs).sum(-1)[2:6], rtol=0, atol=1e-5)
    assert torch.equal(found["states"], hidden[2:6])


def test_a_fresh_head_is_drawn_the_same_whatever_was_drawn_before():
    model = value_model("llama", "token_values")
    first = fresh_head(model, "token_values")
    torch.manual_seed(99)
    again = fresh_head(model, "token_values")
    assert first.keys() == again.keys() == {"score.weight", "score.bias"}
    assert torch.equal(again["score.weight"], first["score.weight"])
    std = model.config.initializer_range
    assert 0.5 * std < float(first["score.weight"].std()) < 1.5 * std
    assert not first["score.bias"].any()
    assert fresh_head(value_model("llama", "sequence_scores"), "sequence_scores").keys() == {"score.weight"}
    assert fresh_head(tiny_model("llama"), "logprobs") is None


def test_a_head_may_be_called_classifier():
    """In GPT-2's and GPT-NeoX's token classifiers."""
    torch.manual_seed(3)
    config = GPTNeoXConfig(
        vocab_size=100, hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=16, num_labels=1
    )
    model = AutoModelForTokenClassification.from_config(config, attn_implementation="eager").eval()
    assert fresh_head(model, "token_values").keys() == {"classifier.weight", "classifier.bias"}
    for tokens in sequences():
        logits = model(input_ids=tokens[None], use_cache=False).logits[0, :, 0]
        expected = torch.cat([torch.zeros(1), logits[:-1]])
        torch.testing.assert_close(values_of(model, "token_values", tokens), expected, rtol=0, atol=1e-5)
        assert logits.abs().max() > 0.01


def test_only_the_head_of_a_reward_model_knows_the_padding():
    """Its own config names it, in which the engine puts the tokenizer's."""
    model = value_model("llama", "sequence_scores")
    assert make_head(model, "sequence_scores").pad_token_id == 0
    model.config.pad_token_id = 7
    assert make_head(model, "sequence_scores").pad_token_id == 7
    assert make_head(value_model("llama", "token_values"), "token_values").pad_token_id is None
    assert make_head(tiny_model("llama"), "logprobs").pad_token_id is None


def test_a_family_without_an_initializer_range_gets_the_default_of_transformers():
    model = AutoModelForSequenceClassification.from_config(OPTConfig(num_hidden_layers=1, num_labels=1, vocab_size=8))
    assert 0.018 < float(fresh_head(model, "sequence_scores")["score.weight"].std()) < 0.022
