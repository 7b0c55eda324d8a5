from pathlib import Path

import pytest

from shardwise.config import AlgorithmConfig, Colocated, ConfigError, RolloutConfig, Split


def rollout(**keys):
    return RolloutConfig.parse(keys, origin="test")


def test_the_name_alone_stands_for_the_defaults_and_keys_alone_mean_split():
    assert rollout().placement == rollout(placement="colocated").placement == Colocated()
    assert rollout(placement="split").placement == Split(num_ranks=1)
    assert rollout(placement={"num_ranks": 2}).placement == Split(num_ranks=2)
    assert rollout(placement={"num_ranks": 2}).split == Split(num_ranks=2)
    assert rollout().split is None


def test_staleness_needs_ranks_that_only_sample():
    assert rollout(placement="split", max_staleness=3).max_staleness == 3
    with pytest.raises(ConfigError, match=r"max_staleness=1 .* set rollout\.placement=split, or max_staleness=0"):
        rollout(max_staleness=1)


def test_partial_rollouts_need_something_to_interrupt_and_an_engine_that_goes_on():
    assert rollout(placement="split", max_staleness=1, partial=True).partial
    with pytest.raises(ConfigError, match=r"partial=true .* set rollout\.max_staleness to 1 or more, or partial=false"):
        rollout(placement="split", partial=True)
    for engine in ({"type": "vllm", "process": {}}, {"type": "embedded", "process": {}}):
        assert rollout(placement="split", max_staleness=1, partial=True, engine=engine).partial
    with pytest.raises(ConfigError, match=r"partial=true with engine=sglang: it cannot be interrupted; set engine=emb"):
        rollout(placement="split", max_staleness=1, partial=True, engine="sglang")


def test_ranks_that_only_sample_have_nobody_to_sleep_for():
    with pytest.raises(ConfigError, match=r"placement=split with engine.sleep_level=1: .* set engine.sleep_level=0"):
        rollout(placement="split", engine={"type": "vllm", "process": {}, "sleep_level": 1})
    with pytest.raises(ConfigError, match=r"placement=split with engine.sleep_level=1"):
        rollout(placement="split", engine={"type": "embedded", "sleep_level": 1})


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"placement": "apart"}, "placement"),
        ({"placement": {"type": "colocated", "num_ranks": 2}}, "num_ranks"),
        ({"placement": {"num_ranks": 0}}, "num_ranks"),
        ({"placement": "split", "max_staleness": -1}, "max_staleness"),
    ],
)
def test_what_means_nothing_is_named(keys, message):
    with pytest.raises(ConfigError, match=message):
        rollout(**keys)


def test_an_override_adds_a_key_to_what_the_file_names_alone(tmp_path):
    """So it is for a function's name too."""
    path = tmp_path / "config.yaml"
    path.write_text("placement: split\nengine: embedded\n")
    loaded = RolloutConfig.load(path, ["placement.num_ranks=2", "engine.compile_decode=true"])
    assert loaded.placement == Split(num_ranks=2)
    assert loaded.engine.compile_decode
    path.write_text("policy_loss: gspo\n")
    assert AlgorithmConfig.load(path, ["policy_loss.clip_low=0.1", "num_epochs=2"]).policy_loss.clip_low == 0.1
    with pytest.raises(ConfigError, match="num_rank"):
        RolloutConfig.load(None, ["placement=split", "placement.num_rank=2"])


def test_a_folder_goes_with_the_disk():
    assert rollout(placement={"num_ranks": 1, "medium": "disk", "folder": "/shared"}).split.folder == Path("/shared")
    with pytest.raises(ConfigError, match=r"medium=disk needs `folder`: one that rank 0 and the ranks"):
        rollout(placement={"medium": "disk"})
    with pytest.raises(ConfigError, match=r"folder=/shared would change nothing with medium=process_group; set"):
        rollout(placement={"folder": "/shared"})
