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


def test_the_version_changes_with_the_commit_and_not_with_the_load(engine):
    engine.load_weights(dict(engine.served_weights()).items())
    assert engine.generate([request_of("a", [5])])[0][0].policy_version == 0
    engine.commit_weights(7)
    assert engine.generate([request_of("a", [5])])[0][0].policy_version == 7
