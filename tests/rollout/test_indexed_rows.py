"""Layers whose indexer chooses the keys that a token sees, in the embedded engine: against transformers, which reads
every sequence alone and from its beginning."""

from dataclasses import replace

import pytest
import torch
from family_checks import CPU, eager_logprobs, require_logprobs_of, sequences
from family_table import FAMILIES, save_model

from shardwise.families.key_choice import DeferredIndexer
from shardwise.rollout import EmbeddedEngine
from shardwise.types import GenerateRequest

KINDS = ["deepseek_v32", "glm_moe_dsa", "dots3_note_text", "hy_v4"]
"""An indexer in every layer; one that the second layer shares; one beside layers without; attention sinks."""
MAX_TOKENS = 7
ATOL = 2e-5


def save(family, folder, **options):
    return save_model(family, FAMILIES[family] | options, folder)


def open_engine(folder, **options):
    return EmbeddedEngine.from_folder(folder, dtype=torch.float32, max_rows=4, device=CPU, **options)


def requests(lengths=(9, 5, 1, 2, 5)):
    """Prompts with fewer tokens than are chosen go on to more."""
    return [
        GenerateRequest(uid=f"{i}", prompt_ids=ids.tolist(), num_completions=3, max_tokens=MAX_TOKENS, temperature=1.0)
        for i, ids in enumerate(sequences(lengths))
    ]


@pytest.mark.parametrize("family", KINDS)
def test_completions_see_the_keys_that_their_indexers_choose(tmp_path, family):
    """Fifteen completions of ragged prompts in four rows: prompts wait, rows end and move."""
    model = save(family, tmp_path)
    asked = requests()
    found = open_engine(tmp_path).generate(asked)
    assert len({tuple(completion.token_ids) for group in found for completion in group}) > 12
    for request, group in zip(asked, found, strict=True):
        for completion in group:
            require_logprobs_of(model, request, completion, atol=ATOL)


@pytest.mark.parametrize("family", KINDS)
def test_an_interrupted_completion_of_a_model_with_indexers_goes_on(tmp_path, family):
    model = save(family, tmp_path)
    engine = open_engine(tmp_path)
    (request, *_) = (replace(request, num_completions=1) for request in requests())
    (whole,) = engine.generate([request])[0]
    begun = replace(request, partial_token_ids=whole.token_ids[:3], max_tokens=MAX_TOKENS - 3)
    (rest,) = engine.generate([begun])[0]
    assert begun.partial_token_ids + rest.token_ids == whole.token_ids
    require_logprobs_of(model, begun, rest, atol=ATOL)


def test_given_sequences_see_the_keys_that_their_indexers_choose(tmp_path):
    model = save("glm_moe_dsa", tmp_path)
    tokens = sequences((9, 2))
    for found, sequence in zip(open_engine(tmp_path).logprobs([t.tolist() for t in tokens]), tokens, strict=True):
        torch.testing.assert_close(torch.tensor(found), eager_logprobs(model, sequence), atol=2e-5, rtol=0)


def test_no_indexer_is_asked_where_it_would_choose_every_key(tmp_path):
    model = save("deepseek_v32", tmp_path, index_topk=64)
    engine = open_engine(tmp_path)
    calls = []
    for part in engine._model.modules():
        if isinstance(part, DeferredIndexer):
            part._checkpoint_wrapped_module.register_forward_hook(lambda *_: calls.append(1))
    asked = requests()
    for request, group in zip(asked, engine.generate(asked), strict=True):
        for completion in group:
            require_logprobs_of(model, request, completion, atol=ATOL)
    assert not calls


def test_the_keys_of_indexers_count_as_cache(tmp_path):
    save("deepseek_v32", tmp_path)
    options = FAMILIES["deepseek_v32"]
    per_layer = options["num_key_value_heads"] * (
        options["qk_nope_head_dim"] + options["qk_rope_head_dim"] + options["v_head_dim"]
    )
    expected = 2 * 4 * (per_layer + options["index_head_dim"])
    assert open_engine(tmp_path)._cached.cache_size.token_bytes == expected


@pytest.mark.full
def test_compiled_decoding_sees_the_keys_that_indexers_choose(tmp_path, caplog):
    """In more layers than torch compiles one function for."""
    num_layers = torch._dynamo.config.recompile_limit + 2
    model = save(
        "glm_moe_dsa", tmp_path, num_hidden_layers=num_layers, indexer_types=["full", "shared"] * (num_layers // 2)
    )
    asked = requests()
    for request, group in zip(asked, open_engine(tmp_path, compile_decode=True).generate(asked), strict=True):
        for completion in group:
            require_logprobs_of(model, request, completion, atol=ATOL)
    assert "recompile_limit" not in caplog.text
