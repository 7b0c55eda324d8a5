import json
import socket
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta

import pytest
import torch.distributed as dist
from tiny_models import tiny_model

from shardwise.config import ConfigError, PreferenceConfig, RLConfig, SFTConfig
from shardwise.controller.process_group import Rank
from shardwise.recipes.rank import identity as module
from shardwise.recipes.rank.identity import identity_of, require_same_identity

FIRST, SECOND, BESIDE = Rank(0, 3, 0), Rank(2, 3, 0), Rank(1, 3, 1)


def config_of(path, **trainer):
    tree = {"model": {"path": str(path)}, "data": {"train_files": "a.jsonl"}, "trainer": trainer}
    return SFTConfig.parse(tree, origin="test")


@pytest.fixture
def meet():
    """Three ranks meet, of which all that differ from the first are told so; returns what each of them was told."""

    def compare(first, other, rank=SECOND):
        store = dist.HashStore()
        store.set_timeout(timedelta(seconds=20))
        identities = {one: other if one == rank else first for one in (FIRST, SECOND, BESIDE)}
        with ThreadPoolExecutor(3) as threads:
            calls = [threads.submit(require_same_identity, one, store, found) for one, found in identities.items()]
        errors = {str(call.exception()) for call in calls}
        assert len(errors) == 1, "every rank is told the same"
        assert all(call.exception() is None or call.exception().is_shared for call in calls)
        calls[0].result()

    return compare


@pytest.fixture
def model(tmp_path):
    tiny_model("llama").save_pretrained(tmp_path / "model")
    return tmp_path / "model"


def test_ranks_that_were_started_alike_go_on(meet, model):
    meet(identity_of(config_of(model), FIRST), identity_of(config_of(model), SECOND))
    meet(identity_of(None, FIRST), identity_of(None, SECOND))


def test_keys_that_differ_are_named_with_both_values_and_both_hosts(meet, model):
    with pytest.raises(ConfigError) as caught:
        meet(
            identity_of(config_of(model), FIRST),
            identity_of(config_of(model, seed=5, learning_rate=0.5, total_steps=3, output_dir="b"), SECOND),
        )
    host = socket.gethostname()
    assert str(caught.value).startswith(f"rank 2 on {host} differs from rank 0 on {host} in trainer.")
    assert "trainer.learning_rate (0.5 and " in str(caught.value)
    assert " and 1 more; start the same command with the same code, packages and model folders" in str(caught.value)


@pytest.mark.parametrize(
    ("engine", "told"),
    [({"lora": {"rank": 4}}, "engine.lora.rank (4 and None)"), ({}, "engine.lora.rank (None and 4)")],
)
def test_a_group_that_one_rank_has_alone_is_a_difference(meet, model, engine, told):
    tree = {"model": {"path": str(model)}, "data": {"train_files": "a.jsonl"}}
    own, other = (tree | {"engine": one} for one in (engine, {} if engine else {"lora": {"rank": 4}}))
    with pytest.raises(ConfigError) as caught:
        meet(*(identity_of(SFTConfig.parse(one, origin="test"), rank) for one, rank in ((other, FIRST), (own, SECOND))))
    assert told in str(caught.value)


def test_entries_of_a_list_are_compared_one_by_one(meet, model):
    def judged_by(*functions):
        tree = {
            "model": {"path": str(model)},
            "data": {"train_files": "a.jsonl"},
            "reward": {"functions": [*functions]},
        }
        return RLConfig.parse(tree, origin="test")

    first = identity_of(judged_by("a:b", {"function": "c:d", "weight": 2}), FIRST)
    for other, told in (
        (judged_by("a:b", "c:d"), "reward.functions.1.weight (1.0 and 2.0);"),
        (judged_by("a:b"), "reward.functions.1.type (None and function), "),
    ):
        with pytest.raises(ConfigError) as caught:
            meet(first, identity_of(other, SECOND))
        assert f"in {told}" in str(caught.value)


def test_another_model_under_the_same_path_is_noticed_by_one_rank_of_a_host(meet, model):
    first = identity_of(config_of(model), FIRST)
    tiny_model("llama", seed=1).save_pretrained(model)
    with pytest.raises(ConfigError, match=r"rank 2 .* in the files of model\.path; start the same"):
        meet(first, identity_of(config_of(model), SECOND))
    meet(first, identity_of(config_of(model), BESIDE), BESIDE)


def test_a_model_that_is_on_one_host_alone_is_left_to_whoever_opens_it(meet, model, tmp_path):
    first = identity_of(config_of(model), FIRST)
    model.rename(tmp_path / "elsewhere")
    meet(first, identity_of(config_of(model), SECOND))


def test_another_function_of_the_users_own_under_the_same_path_is_noticed(meet, model, tmp_path):
    """Ranks would train on the sum of two losses."""
    file = tmp_path / "own.py"
    tree = {"model": {"path": str(model)}, "data": {"train_files": "a.jsonl"}, "loss": f"{file}:loss"}
    config = PreferenceConfig.parse(tree, origin="test")
    file.write_text("def loss(sums, ref_sums, lengths): return -sums")
    first = identity_of(config, FIRST)
    meet(first, identity_of(config, SECOND))
    file.write_text("def loss(sums, ref_sums, lengths): return +sums")
    with pytest.raises(ConfigError, match=r"^rank 2 .* differs from rank 0 on .* in the files of loss; start the same"):
        meet(first, identity_of(config, SECOND))
    file.unlink()
    meet(first, identity_of(config, SECOND))  # who calls it says that it is not there


def test_other_code_is_noticed(meet, monkeypatch, tmp_path):
    first = identity_of(None, FIRST)
    (tmp_path / "own.py").write_text("betas = (0.8, 0.9)")
    monkeypatch.setattr(module, "_PACKAGE", tmp_path)
    with pytest.raises(ConfigError, match=r"rank 2 .* in the code of shardwise; start the same"):
        meet(first, identity_of(None, SECOND))


def test_it_travels_as_json(model):
    identity = identity_of(config_of(model), FIRST)
    assert json.loads(json.dumps(identity)).keys() == identity.keys()
