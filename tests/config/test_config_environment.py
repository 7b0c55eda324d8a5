import pytest

from shardwise.config import ConfigError, CustomEnvironment, EvalConfig, RLConfig, ToolsEnvironment

TREE = {"model": {"path": "m"}, "data": {"train_files": "a.jsonl"}, "reward": {"functions": "a.py:b"}}


def parse(environment, *, cls=RLConfig, **groups):
    return cls.parse({**TREE, "rollout": {"environment": environment}, **groups}, origin="test")


def test_an_import_path_or_a_group_without_type_is_a_class_of_ones_own():
    for given in ("a.py:Game", {"path": "a.py:Game"}, {"type": "custom", "path": "a.py:Game"}):
        assert parse(given).rollout.environment == CustomEnvironment(path="a.py:Game")
    assert parse(None).rollout.environment is None
    assert parse("a.py:Game").rollout.sampling().environment == CustomEnvironment(path="a.py:Game")


@pytest.mark.parametrize(
    ("overrides", "chosen"),
    [
        (["rollout.environment=a.py:Game", "rollout.environment.max_turns=3"], "rollout.environment.max_turns"),
        (["reward.functions=a.py:b", "reward.functions.weight=3"], "reward.functions.0.weight"),
        (
            ["algorithm.advantage=a.py:f", "algorithm.advantage.parameters.x=3"],
            "algorithm.advantage.parameters.x",
        ),
    ],
)
def test_keys_below_an_import_path_that_stands_alone_are_added_to_it(overrides, chosen):
    base = ["model.path=m", "data.train_files=a.jsonl", "reward.functions=a.py:b"]
    found = RLConfig.load(None, [*base, *overrides]).model_dump()
    for key in chosen.split("."):
        found = found[int(key) if key.isdigit() else key]
    assert found == 3


def test_tools_are_a_type():
    chosen = parse({"type": "tools", "functions": ["a.py:f"], "max_turns": 3}).rollout.environment
    assert chosen == ToolsEnvironment(functions=["a.py:f"], max_turns=3)
    assert chosen.call_format == "hermes"


@pytest.mark.parametrize(
    ("environment", "groups", "message"),
    [
        ({"type": "tool"}, {}, "did you mean tools"),
        ({"parameters": {}}, {}, r"rollout\.environment\.path: required"),
        ({"type": "tools", "functions": []}, {}, r"rollout\.environment\.functions=\[\]: list should have at least 1"),
        ({"type": "tools", "functions": ["a.py:f"], "path": "x"}, {}, "type=tools has no such key"),
        ({"type": "tools", "functions": ["a.py:f"], "max_turns": 1}, {}, "max_turns=1 leaves no turn for calls"),
        (
            {"type": "tools", "functions": ["a.py:f"], "tool_timeout_seconds": 60},
            {},
            r"tool_timeout_seconds=60 must be below timeout_seconds=60",
        ),
        (
            {"type": "tools", "functions": ["a.py:f"]},
            {"data": {"train_files": "a.jsonl", "apply_chat_template": False}},
            "type=tools needs the chat template",
        ),
        (None, {"reward": {"functions": {"type": "environment"}}}, r"set rollout\.environment=FILE\.py:Class"),
        ("a.py:G", {"data": {"train_files": "a.jsonl", "tools_column": "t"}}, r"data\.tools_column=t has no effect"),
    ],
)
def test_what_cannot_work_is_refused(environment, groups, message):
    with pytest.raises(ConfigError, match=message):
        parse(environment, **groups)


def test_eval_takes_environments_too():
    tree = {"data": {"validation_files": "a.jsonl"}}
    assert parse("a.py:G", cls=EvalConfig, **tree).rollout.environment is not None
    with pytest.raises(ConfigError, match="has an entry of type environment"):
        parse(None, cls=EvalConfig, **tree, reward={"functions": {"type": "environment"}})
