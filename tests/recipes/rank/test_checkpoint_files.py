"""What a rank saves and loads of its engines, and what it hashes."""

import pytest
import torch
import xxhash
from small_workers import (
    ROLES,
    build_everyone,
    build_one,
    bytes_on_device,
    engine_of,
    roll_out,
    score,
    train,
    trainer_logprobs,
    with_values,
)

from shardwise.config import EngineConfig, ModelConfig
from shardwise.recipes.checkpointing.manifest import write_manifest
from shardwise.recipes.rank.worker import Worker

pytestmark = pytest.mark.usefixtures("alone")


@pytest.mark.parametrize("role", ["policy", "critic"])
def test_saving_writes_the_engine_of_that_role_and_the_others_leave(everyone, tmp_path, role):
    worker = build_everyone(everyone, dict.fromkeys(ROLES, "both"))
    samples = with_values(worker, roll_out(worker))
    train(worker, samples, role)
    worker.save(role, ModelConfig(path=str(everyone)).model_dump_json(), str(tmp_path / "step_1"))
    others = {other: bytes_on_device(engine_of(worker, other))[0] for other in ROLES if other != role}
    assert others == dict.fromkeys(others, 0)
    after = torch.cat(trainer_logprobs(worker, samples, role))
    assert [path.name for path in (tmp_path / "step_1").iterdir()] == ["hf"]
    again = Worker(torch.device("cpu"))
    build_one(again, "saved", tmp_path / "step_1" / "hf", EngineConfig().frozen(), head=ROLES[role])
    torch.testing.assert_close(torch.cat(trainer_logprobs(again, samples, "saved")), after, atol=1e-6, rtol=1e-5)
    roll_out(worker)
    assert bytes_on_device(engine_of(worker, role)) == (0, 0), "saving does not bring it back for good"


def test_a_frozen_engine_is_not_saved(everyone, tmp_path):
    worker = build_everyone(everyone, {})
    with pytest.raises(AssertionError, match="reference is not trained"):
        worker.save("reference", ModelConfig(path=str(everyone)).model_dump_json(), str(tmp_path))


def test_a_state_is_saved_and_loaded_while_other_engines_have_the_device(everyone, tmp_path):
    """The critic's weights and moments are on the host when the command comes."""
    worker, other = (build_everyone(everyone, dict.fromkeys(ROLES, "both")) for _ in range(2))
    samples = with_values(worker, roll_out(worker))
    for _ in range(2):
        train(worker, samples, "critic")
    worker.sync_weights(1)
    worker.save("critic", ModelConfig(path=str(everyone)).model_dump_json(), str(tmp_path), str(tmp_path / "critic"))
    worker.sync_weights(2)  # the critic leaves the device again
    assert other.load_state("critic", str(tmp_path / "critic")) is None
    other.sync_weights(2)
    for one, two in zip(
        score(worker, samples, "critic", max_tokens=40), score(other, samples, "critic", max_tokens=40), strict=True
    ):
        assert torch.equal(one, two)
    again = [train(each, samples, "critic")["train/grad_norm"].result() for each in (worker, other)]
    assert again[0] == again[1]


def test_a_critic_goes_on_from_its_weights_without_states_while_other_engines_have_the_device(everyone, tmp_path):
    """Its value head comes from the checkpoint too."""
    worker, other = (build_everyone(everyone, dict.fromkeys(ROLES, "both")) for _ in range(2))
    samples = with_values(worker, roll_out(worker))
    for _ in range(2):
        train(worker, samples, "critic")
    worker.save("critic", ModelConfig(path=str(everyone)).model_dump_json(), str(tmp_path), str(tmp_path / "state"))
    (tmp_path / "state" / "rank_0.safetensors").unlink()
    other.sync_weights(1)
    other.load_weights_alone("critic", str(tmp_path), str(tmp_path / "state"))
    worker.sync_weights(2)
    other.sync_weights(2)
    for one, two in zip(
        score(worker, samples, "critic", max_tokens=40), score(other, samples, "critic", max_tokens=40), strict=True
    ):
        assert torch.equal(one, two)
    assert engine_of(other, "critic").state.numbers() == engine_of(worker, "critic").state.numbers()


def test_the_files_of_a_checkpoint_are_hashed_and_verified(tmp_path):
    (tmp_path / "a").write_text("text")
    worker = Worker(torch.device("cpu"))
    (tmp_path / "of another rank").touch()
    hashes = worker.hash_files(["a"], str(tmp_path))
    assert hashes == {"a": {"num_bytes": 4, "xxh3": xxhash.xxh3_64_hexdigest(b"text")}}
    write_manifest(tmp_path, [hashes], step=1)
    assert worker.verify_files(str(tmp_path)) is None
    (tmp_path / "a").write_text("test")
    assert f"{tmp_path / 'a'} is damaged" in worker.verify_files(str(tmp_path))
