import pytest

from shardwise.config import Colocated, ConfigError, RolloutConfig, Split


def rollout(**keys):
    return RolloutConfig.parse(keys, origin="test")


def test_the_name_alone_stands_for_the_defaults_and_keys_alone_mean_split():
    assert rollout().placement == rollout(placement="colocated").placement == Colocated()
    assert rollout(placement="split").placement == Split(num_ranks=1)
    assert rollout(placement={"num_ranks": 2}).placement == Split(num_ranks=2)
    assert rollout(placement={"num_ranks": 2}).num_rollout_ranks == 2
    assert rollout().num_rollout_ranks == 0


def test_staleness_needs_ranks_that_only_sample():
    assert rollout(placement="split", max_staleness=3).max_staleness == 3
    with pytest.raises(ConfigError, match=r"max_staleness=1 .* set rollout\.placement=split, or max_staleness=0"):
        rollout(max_staleness=1)


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
