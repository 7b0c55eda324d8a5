"""What editors are told of a config is what `load` takes."""

import jsonschema
import pytest
import yaml
from commands import RL, SFT

from shardwise.config import RLConfig, SFTConfig
from shardwise.config.json_schema import json_schema


@pytest.fixture(scope="module")
def rl_schema():
    return jsonschema.Draft202012Validator(json_schema(RLConfig))


@pytest.mark.parametrize(
    "override",
    [
        "algorithm.advantage=rloo",
        "algorithm.advantage=rules.py:mine",
        "algorithm.aggregation={name: custom, function: 'rules.py:mine'}",
        "reward.functions=[{type: function, function: 'r:f'}]",
        "data.train_files=[a, b]",
        "rollout.engine=vllm",
        "rollout.engine={enable_prefix_caching: true, type: vllm}",
        "rollout.placement={num_ranks: 2}",
        "rollout.environment=game.py:Game",
        "reward.functions={function: 'rules.py:mine', weight: 0.5}",
        "reward.functions=[rules.py:mine, {function: 'r:f'}]",
        "engine.freeze_module_prefix=model.visual",
    ],
)
def test_short_forms_are_valid(rl_schema, override):
    key, _, value = override.partition("=")
    given = yaml.safe_load("model: {path: m}\ndata: {train_files: f}\nreward: {functions: 'r:score'}")
    node = given
    for part in key.split(".")[:-1]:
        node = node.setdefault(part, {})
    node[key.rpartition(".")[2]] = yaml.safe_load(value)
    RLConfig.parse(given, origin="test")
    rl_schema.validate(given)


@pytest.mark.parametrize(
    ("given", "path"),
    [
        ({"trainer": {"total_step": 5}}, ["trainer"]),
        ({"trainer": {"total_steps": "many"}}, ["trainer", "total_steps"]),
        ({"algorithm": {"advantage": "grop"}}, ["algorithm", "advantage"]),
        ({"rollout": {"engine": {"type": "vllm", "speed": 2}}}, ["rollout", "engine"]),
    ],
)
def test_mistakes_are_found_where_they_are(rl_schema, given, path):
    whole = {"model": {"path": "m"}, "data": {"train_files": "f"}, "reward": {"functions": "r:score"}, **given}
    assert [list(error.path) for error in rl_schema.iter_errors(whole)] == [path]


@pytest.mark.parametrize(("cls", "keys"), [(SFTConfig, SFT), (RLConfig, RL)])
def test_a_resolved_config_is_valid_and_keys_say_what_they_are(cls, keys):
    schema = json_schema(cls)
    jsonschema.Draft202012Validator.check_schema(schema)
    jsonschema.validate(yaml.safe_load(cls.load(None, keys).to_yaml()), schema)
    assert schema["$defs"]["EngineConfig"]["properties"]["fsdp_size"]["description"]
