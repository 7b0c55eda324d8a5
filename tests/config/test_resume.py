import pytest

from shardwise.config import (
    ConfigError,
    DistillConfig,
    PreferenceConfig,
    RewardModelConfig,
    RLConfig,
    SFTConfig,
    allows_other_rows,
    changes_that_matter,
    key_paths,
    keys_to_allow,
    require_known_keys,
)
from shardwise.config.resume import LENGTH_KEYS, MAY_CHANGE

TRAINING = (SFTConfig, PreferenceConfig, RewardModelConfig, DistillConfig, RLConfig)


LINEAR = ["trainer.lr_schedule=linear"]


def rl(*overrides) -> RLConfig:
    base = ["model.path=m", "data.train_files=t.jsonl", "reward.functions=[a:b, c:d]"]
    return RLConfig.load(None, [*base, *overrides])


def changes(before, after, *allowed):
    return changes_that_matter(rl(*before).model_dump(mode="json"), rl(*after), allowed=allowed)


@pytest.mark.parametrize(
    ("before", "after", "expected"),
    [
        ([], [], {}),
        (["trainer.output_dir=a", "trainer.save_every_steps=3"], ["trainer.output_dir=b"], {}),
        ([], ["trainer.faults=[rank=1 step=7 phase=backward action=kill]"], {}),
        (["engine.fsdp_size=2"], ["engine.ulysses_size=2", "engine.activation_checkpointing=full"], {}),
        ([], ["trainer.learning_rate=0.5"], {"trainer.learning_rate": (1e-5, 0.5)}),
        ([], ["engine.master_dtype=bfloat16", "engine.param_dtype=bfloat16"], {
            "engine.master_dtype": ("float32", "bfloat16"), "engine.param_dtype": ("float32", "bfloat16"),
        }),
        ([], ["reward.functions=[a:b, c:e]"], {"reward.functions.1.function": ("c:d", "c:e"),
                                               "reward.functions.1.name": ("d", "e")}),
        ([], ["reward.functions=[a:b]"], {f"reward.functions.1.{key}": (value, None) for key, value in {
            "type": "function", "function": "c:d", "name": "d", "weight": 1.0, "parameters": {}}.items()}),
        (["engine.lora={rank: 4}"], ["engine.lora={rank: 8}"], {"engine.lora.rank": (4, 8)}),
        (["engine.lora={rank: 4}"], ["engine.lora={rank: 4, save_merged: false}"], {}),
        (["trainer.total_steps=5"], ["trainer.total_steps=9"], {}),
        ([*LINEAR, "trainer.total_steps=5"], [*LINEAR, "trainer.total_steps=9"], {"trainer.total_steps": (5, 9)}),
    ],
)  # fmt: skip
def test_what_changes_numbers_is_named_with_both_values(before, after, expected):
    assert changes(before, after) == expected


def test_a_schedule_of_the_critic_counts_for_the_length_too():
    critic = ["algorithm.advantage=gae", "critic={optimizer: {lr_schedule: cosine}}"]
    assert changes([*critic, "trainer.total_steps=5"], critic) == {"trainer.total_steps": (5, None)}


@pytest.mark.parametrize(
    ("allowed", "left"),
    [
        ("trainer.learning_rate", {"reward.functions.0.weight"}),
        ("trainer", {"reward.functions.0.weight"}),
        ("reward.functions.weight", {"trainer.learning_rate"}),
        ("reward", {"trainer.learning_rate"}),
    ],
)
def test_what_is_allowed_by_key_or_group_is_no_change(allowed, left):
    after = ["trainer.learning_rate=0.5", "reward.functions=[{function: 'a:b', weight: 2.0}, c:d]"]
    assert changes([], after, allowed).keys() == left


def test_an_allowed_key_that_does_not_exist_is_named():
    require_known_keys(["trainer.seed", "reward.functions.weight", "data"], rl())
    with pytest.raises(ConfigError, match=r"trainer.resume_allow names trainer.sed, which this config does not have"):
        require_known_keys(["trainer.sed", "data"], rl())


@pytest.mark.parametrize(
    ("allowed", "expected"),
    [
        ([], False),
        (["trainer.learning_rate", "engine", "rollout.temperature", "reward"], False),
        (["trainer", "data"], True),
        (["data.max_train_rows"], True),
        (["model.chat_template"], True),
        (["rollout"], True),
        (["rollout.environment"], True),
    ],
)
def test_other_rows_are_allowed_by_what_decides_on_them_and_by_groups_of_it(allowed, expected):
    require_known_keys(allowed, rl())
    assert allows_other_rows(allowed) is expected


def test_every_key_of_the_list_is_one_of_some_config():
    """And every one of a layout is decided on: a new key of an engine stands in the list or below."""
    known = {path for cls in TRAINING for path in key_paths(cls)}
    assert known >= LENGTH_KEYS
    engine = {path for path in key_paths(SFTConfig) if path.startswith("engine.") and path.count(".") == 1}
    assert engine - MAY_CHANGE == {
        *("engine.param_dtype", "engine.master_dtype", "engine.reduce_dtype", "engine.module_precision"),
        *("engine.freeze_module_prefix", "engine.lora", "engine.strategy"),
        *("engine.freeze_router", "engine.router_aux_loss_coef"),
    }
    own = {path for path in MAY_CHANGE if path.startswith(("trainer.", "data.", "rollout.", "reward.num", "engine."))}
    assert own <= known


def test_a_key_that_has_come_since_counts_as_its_default():
    tree = rl().model_dump(mode="json")
    del tree["rollout"]["top_p"]
    assert changes_that_matter(tree, rl(), allowed=[]) == {}
    assert changes_that_matter(tree, rl("rollout.top_p=0.5"), allowed=[]) == {"rollout.top_p": (1.0, 0.5)}
    tree["rollout"]["gone"] = 3  # a key of an older version
    assert changes_that_matter(tree, rl(), allowed=[]) == {"rollout.top_p": (None, 1.0), "rollout.gone": (3, None)}


CRITIC = "algorithm.advantage=gae"


@pytest.mark.parametrize(
    ("null", "spelt_out", "changed", "expected"),
    [
        (["reference=null"], ["reference.offload_policy=true"], ["reference.param_dtype=float32"], "reference"),
        ([CRITIC, "critic={}"], [CRITIC, "critic.engine.ulysses_size=2"],
         [CRITIC, "critic.engine.param_dtype=float32"], "critic.engine"),
        (["teachers=[{model: {path: t}}, {model: {path: u}, data_source: u}]"],
         ["teachers=[{model: {path: t}}, {model: {path: u}, data_source: u, engine: {fsdp_size: 1}}]"],
         ["teachers=[{model: {path: t}}, {model: {path: u}, data_source: u, engine: {param_dtype: float32}}]"],
         "teachers.1.engine"),
    ],
    ids=["reference", "critic", "teachers"],
)  # fmt: skip
def test_a_layout_that_is_spelt_out_is_compared_with_the_one_that_null_takes(null, spelt_out, changed, expected):
    """A reference that goes to host memory when the run is resumed computes what it computed before."""
    teaches = ["algorithm.advantage=distill", "reward=null"] if "teachers" in expected else []
    compares = ["algorithm.kl_coef=0.1"] if expected == "reference" else []
    policy = ["engine.param_dtype=bfloat16", *teaches, *compares]
    null, spelt_out, changed = [*policy, *null], [*policy, *spelt_out], [*policy, *changed]
    assert changes(null, spelt_out) == changes(spelt_out, null) == {}
    assert changes(null, changed) == {f"{expected}.param_dtype": ("bfloat16", "float32")}
    assert changes(changed, null) == {f"{expected}.param_dtype": ("float32", "bfloat16")}


def test_a_layout_that_cannot_be_spelt_out_is_a_change_of_what_forbids_it():
    def preference(*overrides):
        return PreferenceConfig.load(None, ["model.path=m", "data.train_files=t.jsonl", *overrides])

    before, after = preference("engine.lora={rank: 4}"), preference("reference.fsdp_size=1")
    found = changes_that_matter(before.model_dump(mode="json"), after, allowed=[])
    assert found["engine.lora.rank"] == (4, None)
    assert "reference" not in found


def test_a_run_keeps_the_layout_that_its_config_spells_out():
    """One that was saved when the reference did not take the policy's keys resumes; the file it was started from does
    not say enough any more."""
    policy = ["engine.param_dtype=bfloat16", "algorithm.kl_coef=0.1"]
    now = rl(*policy, "reference.ulysses_size=2")
    assert changes_that_matter(now.model_dump(mode="json"), now, allowed=[]) == {}
    tree = now.model_dump(mode="json")
    tree["reference"]["param_dtype"] = "float32"
    spelt_out = RLConfig.parse(tree, origin="test")
    assert changes_that_matter(tree, spelt_out, allowed=[]) == {}
    assert spelt_out.reference.param_dtype == "float32"
    assert changes_that_matter(tree, now, allowed=[]) == {"reference.param_dtype": ("float32", "bfloat16")}


def test_keys_in_dicts_of_the_users_own_are_allowed_by_the_key_of_the_dict():
    before, after = (
        [f"reward.functions=[{{function: 'r:f', parameters: {{a: {a}}}}}]", f"trainer.module_learning_rates={rates}"]
        for a, rates in ((1, "{}"), (2, "{model.layers.0: 1.0e-5}"))
    )
    found = changes(before, after)
    assert found == {
        "reward.functions.0.parameters.a": (1, 2),
        "trainer.module_learning_rates.model.layers.0": (None, 1e-5),
    }
    names = keys_to_allow(found, rl())
    assert names == ["reward.functions.parameters", "trainer.module_learning_rates"]
    require_known_keys(names, rl())
    assert changes(before, after, *names) == {}
