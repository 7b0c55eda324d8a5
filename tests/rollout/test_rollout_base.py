"""The contract of every rollout engine. A new engine adds itself to ENGINES."""

import pytest
import torch

from shardwise.rollout import EmbeddedEngine
from shardwise.types import GenerateRequest

ENGINES = {
    "embedded": lambda folder: EmbeddedEngine.from_folder(
        folder, dtype=torch.float32, max_rows=3, device=torch.device("cpu")
    ),
}


@pytest.fixture(params=list(ENGINES))
def engine(request, model_folders):
    return ENGINES[request.param](model_folders["llama"])


def request_of(uid, prompt_ids, **options):
    return GenerateRequest(uid=uid, prompt_ids=prompt_ids, **{"max_tokens": 5, "temperature": 1.0, **options})


def test_results_are_in_the_order_of_the_requests_with_the_number_asked_for(engine):
    wanted = [request_of(f"{i}", [4 + i] * (i + 1), num_completions=1 + i % 4) for i in range(7)]
    alone = [engine.generate([request])[0] for request in wanted]
    together = engine.generate(wanted)
    assert [len(group) for group in together] == [1, 2, 3, 4, 1, 2, 3]
    assert [[c.token_ids for c in group] for group in together] == [[c.token_ids for c in group] for group in alone]


def test_completions_are_whole(engine):
    stop_or_limit = engine.generate([request_of("a", [5, 6], num_completions=20)])[0]
    for completion in stop_or_limit:
        assert len(completion.logprobs) == len(completion.token_ids)
        assert max(completion.logprobs) <= 0.0
        assert (completion.finish_reason == "length") == (completion.token_ids[-1] != 3)
        assert completion.finish_reason == "stop" or len(completion.token_ids) == 5


def test_every_served_weight_can_be_loaded_and_is_then_served(engine):
    doubled = {name: tensor * 2 for name, tensor in engine.served_weights()}
    engine.load_weights(doubled.items())
    assert all(torch.equal(tensor, doubled[name]) for name, tensor in engine.served_weights())
    assert doubled.keys() == dict(engine.served_weights()).keys()


def test_the_version_changes_with_the_commit_and_until_then_nothing_is_generated(engine):
    assert engine.generate([request_of("a", [5])])[0][0].policy_version == 0
    weights = dict(engine.served_weights())
    engine.load_weights(iter([]))  # a sync that failed before its first tensor has changed nothing
    assert engine.generate([request_of("a", [5])])[0][0].policy_version == 0
    engine.load_weights(weights.items())
    for ask in (lambda: engine.generate([request_of("a", [5])]), lambda: engine.logprobs([[5, 6]])):
        with pytest.raises(RuntimeError, match="sync them whole before it generates"):
            ask()
    engine.commit_weights(7)
    assert engine.generate([request_of("a", [5])])[0][0].policy_version == 7


def test_a_sync_that_fails_in_the_middle_leaves_nothing_to_generate_with(engine):
    name, tensor = next(engine.served_weights())

    def breaking_off():
        yield name, tensor.clone()
        raise OSError("the sender is gone")

    with pytest.raises(OSError, match="the sender is gone"):
        engine.load_weights(breaking_off())
    with pytest.raises(RuntimeError, match="sync them whole before it generates"):
        engine.generate([request_of("a", [5])])


def test_logprobs_are_those_that_sampling_at_temperature_1_reported(engine):
    """1e-4 nats in float32: prefill and decoding add up in another order."""
    prompts = [[5, 6, 7], [9]]
    groups = engine.generate([request_of(f"{i}", ids, num_completions=2) for i, ids in enumerate(prompts)])
    pairs = [(ids, completion) for ids, group in zip(prompts, groups, strict=True) for completion in group]
    scored = engine.logprobs([ids + completion.token_ids for ids, completion in pairs])
    for (ids, completion), logprobs in zip(pairs, scored, strict=True):
        assert len(logprobs) == len(ids) + len(completion.token_ids) - 1
        assert logprobs[len(ids) - 1 :] == pytest.approx(completion.logprobs, abs=1e-4)
