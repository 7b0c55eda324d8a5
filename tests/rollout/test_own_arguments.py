import pytest

from shardwise.config import ConfigError
from shardwise.rollout.own_arguments import OwnArgument, require_left_alone

OWN = {"gpu_memory_utilization": OwnArgument(0.5, "rollout.engine.gpu_memory_utilization"), "port": OwnArgument(3000)}


@pytest.mark.parametrize("name", ["gpu_memory_utilization", "gpu-memory-utilization"])
def test_an_argument_that_a_key_of_ours_sets_names_the_key(name):
    with pytest.raises(ConfigError) as error:
        require_left_alone({"seed": 1, name: 0.9}, OWN)
    assert str(error.value) == (
        f"rollout.engine.args.{name}: Shardwise sets this itself, from rollout.engine.gpu_memory_utilization; set "
        "that, and remove this"
    )


def test_one_that_no_key_sets_says_so_and_others_are_let_through():
    with pytest.raises(ConfigError, match=r"^rollout\.engine\.args\.port: .* itself, no key changes it; remove it$"):
        require_left_alone(["port"], OWN)
    require_left_alone(["ports", "seed"], OWN)
