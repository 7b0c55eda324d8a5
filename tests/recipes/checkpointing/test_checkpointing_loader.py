from pathlib import Path

import pytest

from shardwise.config import ModelError
from shardwise.recipes.checkpointing.loader import Loader

STEP = Path("run", "checkpoints", "step_3")


@pytest.fixture
def loader_of(fake_group, remote):
    """Of a policy and a critic, with what the ranks say is damaged."""

    def make(*, files=None, critic=None):
        group = fake_group(
            2,
            verify_files=lambda *_: files,
            load_state=lambda _rank, role, _folder: critic if role == "critic" else None,
        )
        return Loader({"": remote(group, "policy"), "critic": remote(group, "critic")}), group

    return make


def test_every_engine_is_brought_to_its_state(loader_of):
    loader, group = loader_of()
    loader.verify(STEP)
    assert loader.load(STEP) == {}
    assert group.calls == [
        ("verify_files", str(STEP)),
        ("load_state", "policy", f"{STEP}/state/policy"),
        ("load_state", "critic", f"{STEP}/state/critic"),
    ]


def test_damage_is_an_error_but_of_training_states_it_is_named(loader_of):
    loader, _ = loader_of(files="hf/config.json is missing", critic="rank_1.safetensors is damaged")
    with pytest.raises(ModelError, match=r"^hf/config.json is missing$"):
        loader.verify(STEP)
    assert loader.load(STEP) == {"critic": "rank_1.safetensors is damaged"}


def test_engines_without_a_state_go_on_from_their_weights(loader_of):
    loader, group = loader_of()
    loader.load_weights_alone(STEP, ["critic"])
    assert group.calls == [("load_weights_alone", "critic", f"{STEP}/critic", f"{STEP}/state/critic")]
