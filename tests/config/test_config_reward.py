import pytest

from shardwise.config import ConfigError, FunctionReward, JudgeReward, RewardConfig, RLConfig

JUDGE = {"type": "judge", "base_url": "http://localhost/v1", "model": "m", "prompt_template": "{completion}"}


def error_of(**tree):
    with pytest.raises(ConfigError) as error:
        RewardConfig.parse(tree, origin="test")
    return str(error.value)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("num_workers", 0),
        ("timeout_seconds", 0),
        ("timeout_seconds", 1e7),
        ("on_failure", "retry"),
        ("failure_value", "nan"),
        ("max_failure_rate", 1.5),
    ],
)
def test_value_out_of_range_is_refused(key, value):
    assert error_of(functions="a:b", **{key: value}).startswith(f"test: {key}={value!r}: input should be ")


def test_value_of_failed_rewards_needs_the_policy_that_uses_it():
    assert "failure_value=3.0 has no effect with on_failure=abort" in error_of(functions="a:b", failure_value=3)
    assert "has no effect with on_failure=mask" in error_of(functions="a:b", failure_value=3, on_failure="mask")
    assert RewardConfig(functions="a:b", failure_value=3, on_failure="value").failure_value == 3
    assert "memory_bytes=67108864 bounds the processes of reward functions, and there are none" in error_of(
        functions=[JUDGE], memory_bytes=1 << 26
    )
    assert "67108864" in error_of(functions="a:b", memory_bytes=1)
    assert error_of(functions=[JUDGE], timeout_seconds=7) == (
        "test: timeout_seconds=7.0 is of the processes of reward functions, and there are none; remove it or set "
        "timeout_seconds=30, the default"
    )
    assert RewardConfig(functions=[], manager="a:b", timeout_seconds=7).timeout_seconds == 7
    assert "max_failure_rate=0.9 has no effect with on_failure=abort" in error_of(functions="a:b", max_failure_rate=0.9)


@pytest.mark.parametrize(
    "given",
    [
        "r.py:f",
        ["r.py:f"],
        {"function": "r.py:f"},
        [{"function": "r.py:f"}],
        {"type": "function", "function": "r.py:f", "name": "f"},
    ],
)
def test_one_function_is_written_in_many_ways(given):
    (entry,) = RewardConfig(functions=given).functions
    assert entry == FunctionReward(function="r.py:f", name="f", weight=1.0, parameters={})


def test_entries_of_several_types_stand_in_one_list_and_the_dump_reads_back():
    config = RewardConfig(functions=["r.py:f", {"function": "r.py:f", "name": "g", "weight": -0.5}, JUDGE])
    assert [(type(entry), entry.name, entry.weight) for entry in config.functions] == [
        (FunctionReward, "f", 1.0),
        (FunctionReward, "g", -0.5),
        (JudgeReward, "judge", 1.0),
    ]
    assert RewardConfig.parse(config.model_dump(mode="json"), origin="dump") == config


def test_names_are_unique():
    assert error_of(functions=["a.py:f", "b.py:f"]) == (
        "test: functions: 2 entries, but several are called 'f'; set their `name`, by which metrics and errors tell "
        "them apart"
    )


def test_workers_that_nothing_needs_are_no_mistake():
    """Files of examples give a number, and the command line cannot take it back."""
    assert RewardConfig(functions=[JUDGE], num_workers=7).num_workers == 7


@pytest.mark.parametrize(
    ("functions", "name", "example"),
    [
        ("rules.py:acc", "acc", "{function: rules.py:acc, name: accuracy}"),
        ([{"function": "a:b", "name": "acc"}], "acc", "{function: a:b, name: accuracy}"),
        ([{**JUDGE, "name": "acc"}], "acc", "{type: judge, name: accuracy}"),
        (["a:b", {"function": "a:c", "name": "b/acc"}], "b/acc", "{function: a:c, name: accuracy}"),
    ],
)
def test_no_entry_takes_the_name_of_a_functions_own_verdict(functions, name, example):
    """Its score, say 0.2 for a part of the tests, would count as the verdict that the completion is correct."""
    assert error_of(functions=functions) == (
        f"test: functions: an entry is called '{name}', but a part acc is the verdict that a function returned (see "
        f"correct_at); set its `name` to another one, as in functions={example}"
    )
    (entry,) = RewardConfig(functions={"function": "rules.py:acc", "name": "accuracy"}).functions
    assert entry.name == "accuracy"


def test_no_functions_need_a_manager():
    assert "functions is empty" in error_of(functions=[])
    for given in ({"functions": []}, {}):
        assert RewardConfig(manager="a.py:B", **given).functions == []


@pytest.mark.parametrize(
    ("functions", "message"),
    [
        (
            [{"function": "a:b", "wieght": 2}],
            "reward.functions.0.wieght: type=function has no such key; it has function, name, weight, parameters",
        ),
        (["a:b", {**JUDGE, "modle": "m"}], "reward.functions.1.modle: type=judge has no such key; it has name, weight, "
         "base_url, model, "),
        (["a:b", {"function": "a:c", "weight": "x"}], "reward.functions.1.weight='x': input should be a valid number"),
        ([{"name": "x"}], "reward.functions.0.function: required, but not given"),
        ([{"type": "jugde"}], "reward.functions.0=jugde: did you mean judge? use one of function, judge"),
        ([3], "reward.functions.0=3: expected a group of keys with type=function or judge"),
    ],
)  # fmt: skip
def test_errors_name_the_entry_and_what_is_allowed(functions, message):
    tree = {"model": {"path": "m"}, "data": {"train_files": "a"}, "reward": {"functions": functions}}
    with pytest.raises(ConfigError) as error:
        RLConfig.parse(tree, origin="test")
    assert message in str(error.value)


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("base_url", "localhost:80", "must begin with http:// or https://"),
        ("prompt_template", "grade it", "holds no {completion}"),
        ("score_pattern", "(", "is no regular expression"),
        ("score_pattern", "[0-9]", "has no group"),
        ("requests_per_second", 1e-12, "input should be greater than or equal to 0.001"),
        ("timeout_seconds", 1e10, "input should be less than or equal to 1000000"),
    ],
)
def test_a_judge_that_cannot_work_is_refused(key, value, message):
    assert message in error_of(functions=[{**JUDGE, key: value}])
