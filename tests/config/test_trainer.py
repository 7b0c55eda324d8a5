import pytest

from shardwise.config import BatchTrainerConfig, ConfigError, EngineConfig, OptimizerConfig, TrainerConfig
from shardwise.config.trainer import require_optimizer_fits, require_states_on_device


def test_optimizer_is_the_part_of_the_trainer_that_an_engine_needs():
    trainer = BatchTrainerConfig(learning_rate=0.5, lr_schedule="wsd", lr_decay_steps=3, batch_size=4, seed=9)
    assert trainer.optimizer_config() == OptimizerConfig(learning_rate=0.5, lr_schedule="wsd", lr_decay_steps=3)
    assert type(trainer.optimizer_config()) is OptimizerConfig


def test_states_that_never_leave_the_host_are_not_offloaded_to_it():
    layout, keys = EngineConfig(optimizer_offload=True), {"engine": "engine", "optimizer": "trainer"}
    require_states_on_device(layout, OptimizerConfig(), **keys)
    with pytest.raises(ValueError, match=r"trainer\.optimizer=adamw_cpu already keeps .* engine\.optimizer_offload="):
        require_states_on_device(layout, OptimizerConfig(optimizer="adamw_cpu"), **keys)


def refusal(layout, optimizer):
    try:
        require_optimizer_fits(
            EngineConfig(**layout), OptimizerConfig(optimizer=optimizer), engine="critic.engine", optimizer="critic.own"
        )
    except ValueError as error:
        return str(error)
    return None


@pytest.mark.parametrize("optimizer", ["adamw_cpu", "adamw_8bit", "muon"])
def test_bfloat16_masters_are_for_adamw(optimizer):
    layout = {"param_dtype": "bfloat16", "master_dtype": "bfloat16"}
    assert refusal(layout, "adamw") is None
    assert refusal({"param_dtype": "bfloat16"}, optimizer) is None
    assert refusal(layout, optimizer) == (
        f"critic.engine.master_dtype=bfloat16 with critic.own.optimizer={optimizer}, which updates float32 weights "
        "only; set critic.engine.master_dtype=float32 or critic.own.optimizer=adamw"
    )


def test_an_optimizer_on_the_host_is_for_weights_that_are_not():
    assert [refusal({"offload_policy": True}, other) for other in ("adamw", "muon", "adamw_8bit")] == [None] * 3
    assert refusal({"offload_policy": True}, "adamw_cpu") == (
        "critic.engine.offload_policy=true already keeps the optimizer states in host memory and computes the update "
        "there, so critic.own.optimizer=adamw_cpu has no effect; remove one of them"
    )


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"keep_every_steps": 10, "save_every_steps": 5}, "keep_every_steps has no effect with keep_last=0"),
        ({"keep_best": {"metric": "val/loss", "mode": "min"}}, "keep_best has no effect with keep_last=0"),
        ({"keep_last": 1, "keep_every_steps": 10}, "keep_every_steps=10 is no multiple of save_every_steps=0"),
        ({"keep_last": 1, "keep_every_steps": 10, "save_every_steps": 4}, "is no multiple of save_every_steps=4"),
        ({"keep_last": 1, "keep_best": {"metric": "val/loss"}}, "keep_best.mode: required"),
        (
            {"keep_last": 1, "save_every_steps": 5, "keep_best": {"metric": "val/loss", "mode": "min"}},
            "no checkpoint but the last has it; set validate_every_steps=5",
        ),
    ],
)
def test_what_is_to_be_kept_must_be_saved_and_can_be_removed(keys, message):
    with pytest.raises(ConfigError, match=message):
        TrainerConfig.parse(keys, origin="test")


def test_faults_are_those_of_the_fault_plan():
    given = ["rank=1 step=7 phase=backward action=kill", "phase=forward action=nan"]
    assert TrainerConfig.parse({"faults": given}, origin="test").faults == given
    with pytest.raises(
        ConfigError, match=r"^test: faults\.1: 'phase=write action=nan' has action=nan, and phase=write "
    ):
        TrainerConfig.parse({"faults": [given[0], "phase=write action=nan"]}, origin="test")
