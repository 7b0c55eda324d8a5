import math
import sys
from dataclasses import fields, replace
from pathlib import Path

import numpy as np
import pytest

from shardwise.config import ConfigError, RewardConfig, RewardError
from shardwise.rewards import CustomRewards, RewardJob, RewardResult, Rewards, check_rewards, make_rewards
from shardwise.rewards.base import Answer

RULES = """
def number(data_source, solution_str, ground_truth, extra_info):
    return float(solution_str)

def scaled(data_source, solution_str, ground_truth, extra_info, factor, offset=0):
    return {"score": factor * float(solution_str) + offset, "acc": solution_str == "2"}

def never(data_source, solution_str, ground_truth, extra_info):
    raise ValueError("never")

async def later(data_source, solution_str, ground_truth, extra_info):
    return 1.0

def one_by_one(data_source, solution_str, ground_truth, extra_info):
    yield 1.0

class Half:
    __hash__ = None

    def __call__(self, data_source, solution_str, ground_truth, extra_info):
        return float(solution_str) / 2

half = Half()

class Custom:
    def __init__(self, config):
        self.config, self.closed = config, False

    def score(self, jobs):
        return RETURNS(jobs)

    def close(self):
        self.closed = True

class Leaves:
    def __init__(self, config):
        raise SystemExit(0)

class NoConfig:
    pass

class NoClose:
    def __init__(self, config):
        self.score = list
"""


@pytest.fixture(autouse=True)
def _rules(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "rules.py").write_text(RULES)


def jobs(*texts):
    return [
        RewardJob(uid=f"a.jsonl:{place}", data_source="", solution_str=text, ground_truth="")
        for place, text in enumerate(texts)
    ]


def score(functions, *texts, **settings):
    with Rewards(RewardConfig(functions=functions, num_workers=1, **settings)) as rewards:
        return rewards.score(jobs(*texts))


TWO = ["rules.py:number", {"function": "rules.py:scaled", "weight": 0.5, "parameters": {"factor": 10, "offset": 1}}]


def test_the_reward_is_the_weighted_sum_and_every_score_a_part_by_its_name():
    first, second = score(TWO, "2", "-1")
    assert first == RewardResult(score=2 + 0.5 * 21, parts={"number": 2.0, "scaled": 21.0, "scaled/acc": 1.0})
    assert second == RewardResult(score=-1 + 0.5 * -9, parts={"number": -1.0, "scaled": -9.0, "scaled/acc": 0.0})


def test_parts_of_a_single_function_keep_their_own_names():
    (result,) = score({"function": "rules.py:scaled", "parameters": {"factor": 1}}, "2")
    assert result == RewardResult(score=2.0, parts={"acc": 1.0, "scaled": 2.0})


@pytest.mark.parametrize("parameters", [{}, {"factor": 1, "ofset": 2}], ids=["missing", "unknown"])
def test_parameters_that_do_not_fit_are_found_before_anything_is_scored(parameters):
    config = RewardConfig(functions={"function": "rules.py:scaled", "parameters": parameters})
    with pytest.raises(ConfigError) as caught:
        check_rewards(config)
    assert str(caught.value).startswith("reward.functions=rules.py:scaled: cannot be called with data_source, ")
    assert "it is scaled(data_source, solution_str, ground_truth, extra_info, factor, offset=0)" in str(caught.value)


@pytest.mark.parametrize(
    ("spec", "parameters", "reason"),
    [
        ("format:pattern_match", {}, "ValueError: pattern=None and tags=None: give one of the two"),
        ("format:pattern_match", {"pattern": "("}, "ValueError: pattern='(' is no regular expression: "),
        (
            "length:target_length",
            {"target": 5, "tolerance": 2, "unit": "letters"},
            "ValueError: unit='letters' is not known; use tokens, words or characters",
        ),
        ("length:overlong_penalty", {"max_length": 4, "buffer": 5}, "ValueError: buffer=5 must be from 1 to max"),
        ("length:overlong_penalty", {"max_length": 4, "buffer": "2"}, "TypeError: "),
        ("repetition:ngram_repetition", {"n": 0}, "ValueError: n=0 must be at least 1"),
    ],
)
def test_parameters_that_a_built_in_function_refuses_are_found_before_anything_is_scored(spec, parameters, reason):
    spec = f"shardwise.rewards.{spec}"
    with pytest.raises(ConfigError) as caught:
        check_rewards(RewardConfig(functions={"function": spec, "parameters": parameters}))
    assert str(caught.value).startswith(f"reward.functions={spec} cannot work with parameters={parameters}: {reason}")


@pytest.mark.parametrize(
    ("spec", "parameters"),
    [
        ("format:pattern_match", {"tags": ["answer"]}),
        ("length:target_length", {"target": 5, "tolerance": 2}),
        ("length:overlong_penalty", {"max_length": 4, "buffer": 2}),
        ("repetition:ngram_repetition", {}),
        ("code:run_python_tests", {}),
    ],
)
def test_parameters_that_a_built_in_function_takes_pass(spec, parameters):
    check_rewards(RewardConfig(functions={"function": f"shardwise.rewards.{spec}", "parameters": parameters}))


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("later", "coroutine function, which returns no score; name a function (def) that runs it with asyncio.run"),
        ("Custom", "class, which returns no score; name a function, or an object of the class that can be called"),
        ("one_by_one", "generator, which returns no score; return the score, do not yield it"),
    ],
)
def test_what_returns_no_score_when_it_is_called_is_refused_before_anything_is_scored(name, kind):
    with pytest.raises(ConfigError) as caught:
        check_rewards(RewardConfig(functions=f"rules.py:{name}"))
    assert str(caught.value) == f"reward.functions=rules.py:{name} is a {kind}"


def test_an_object_that_can_be_called_scores():
    check_rewards(RewardConfig(functions="rules.py:half"))
    assert [result.score for result in score("rules.py:half", "4", "6")] == [2.0, 3.0]


def test_f41_mask_leaves_a_failed_row_and_scores_the_others():
    first, second, third = score("rules.py:number", "1", "x", "3", on_failure="mask")
    assert (first.score, first.failure, third.score, third.failure) == (1.0, None, 3.0, None)
    assert second.failure == "ValueError: could not convert string to float: 'x' (rules.py line 3)"
    assert second.parts == {}


@pytest.mark.parametrize("policy", ["value", "mask"])
def test_f41_more_failures_than_the_rate_stop_with_the_first_row_named(policy):
    texts = ["1", "x", "1", "y", "z"]
    settings = {"on_failure": policy, "max_failure_rate": 0.4}
    assert sum(r.failure is not None for r in score("rules.py:number", *texts[:4], "1", **settings)) == 2
    with pytest.raises(RewardError) as caught:
        score("rules.py:number", *texts, **settings)
    assert str(caught.value) == (
        "3 of 5 reward calls failed, more than reward.max_failure_rate=0.4 allows. The first: reward function "
        "rules.py:number failed for row a.jsonl:1: ValueError: could not convert string to float: 'x' (rules.py line 3)"
    )


def test_f41_the_rate_is_of_all_calls_of_all_functions():
    functions = ["rules.py:number", "rules.py:never"]
    results = score(functions, "1", "2", on_failure="value", max_failure_rate=0.5)
    assert [result.failure for result in results] == ["never: ValueError: never (rules.py line 9)"] * 2


def test_the_first_failure_of_each_kind_is_told(capsys):
    failures = iter(["KeyError: 'a'", "KeyError: 'b'", None, "IndexError: c", "KeyError: d"])
    with custom(
        lambda jobs: [RewardResult(score=1.0, failure=next(failures))], on_failure="mask", max_failure_rate=1
    ) as rewards:
        for number in range(5):
            rewards.score([RewardJob(uid=f"r:{number}", data_source="", solution_str="", ground_truth="")])
    told = "warning: reward.manager=rules.py:Custom failed for row {} (reward.on_failure=mask; "
    told += "reward/failed counts such rows)"
    assert capsys.readouterr().err.splitlines() == [
        told.format("r:0: KeyError: 'a'"),
        told.format("r:3: IndexError: c"),
    ]


def custom(returns, **settings):
    rewards = make_rewards(RewardConfig(functions=[], manager="rules.py:Custom", **settings))
    assert isinstance(rewards, CustomRewards)
    rewards._manager.score.__globals__["RETURNS"] = returns
    return rewards


def test_a_manager_of_the_users_scores_and_is_closed():
    with custom(lambda jobs: [RewardResult(score=len(job.solution_str)) for job in jobs]) as rewards:
        assert [result.score for result in rewards.score(jobs("a", "bb"))] == [1, 2]
    assert rewards._manager.closed


def test_the_manager_of_the_docs_scores():
    page = (Path(__file__).parents[2] / "docs/rewards.md").read_text(encoding="utf-8")
    Path("my_rewards.py").write_text(page.rpartition("```python\n")[2].partition("```")[0])
    config = RewardConfig(functions="rules.py:never", manager="my_rewards.py:Manager", on_failure="value")
    with make_rewards(config) as rewards:
        good, bad, failed = rewards.score(
            [
                RewardJob(uid="a", data_source="", solution_str="so 5 ", ground_truth="5"),
                RewardJob(uid="b", data_source="", solution_str="so 6", ground_truth=5),
                RewardJob(uid="c", data_source="", solution_str="5", ground_truth=""),
            ]
        )
    assert good == RewardResult(score=pytest.approx(0.995), parts={"acc": 1.0})
    assert bad == RewardResult(score=pytest.approx(-0.004), parts={"acc": 0.0})
    assert failed.failure == "the row has no ground truth"


def test_the_docs_name_every_field_of_jobs_and_results():
    page = (Path(__file__).parents[2] / "docs/rewards.md").read_text(encoding="utf-8")
    section = page.rpartition("## A manager of your own")[2]
    names = {field.name for kind in (RewardJob, RewardResult) for field in fields(kind)}
    assert {name for name in names if f"`{name}`" not in section} == set()


def test_what_a_manager_changes_in_its_jobs_is_its_own():
    def spoils(given):
        given[0].extra_info["seen"] = True
        given.clear()
        return [RewardResult(score=1.0)] * 2

    asked = jobs("a", "bb")
    with custom(spoils) as rewards:
        assert len(rewards.score(asked)) == 2
    assert [job.extra_info for job in asked] == [{}, {}]


@pytest.mark.parametrize(
    ("returned", "message"),
    [
        ([RewardResult(score=1.0)] * 3, "returned 3 for 4 completions (rows a.jsonl:0, a.jsonl:1, a.jsonl:2, a."),
        ([], "returned 0 for 4 completions"),
        (None, "returned a NoneType, expected a list of RewardResult"),
        (1.0, "returned a float, expected a list of RewardResult"),
        ([1.0] * 4, "failed for row a.jsonl:0: returned a float, expected a RewardResult"),
        ([None] * 4, "failed for row a.jsonl:0: returned a NoneType, expected a RewardResult"),
        ([RewardResult(score=math.nan)] * 4, "row a.jsonl:0: returned the score nan, expected a finite number"),
        ([RewardResult(score=1.0, parts=None)] * 4, "a.jsonl:0: returned parts that are a NoneType, expected a dict"),
        ([RewardResult(score="1")] * 4, "row a.jsonl:0: returned the score '1', expected a finite number"),
    ],
)  # fmt: skip
def test_f43_what_a_manager_returns_is_checked_with_one_message_each(returned, message):
    with custom(lambda jobs: returned) as rewards, pytest.raises(RewardError) as caught:
        rewards.score(jobs("a", "b", "c", "d"))
    assert str(caught.value).startswith("reward.manager=rules.py:Custom ")
    assert message in str(caught.value)


def test_f43_not_a_number_from_a_manager_goes_by_the_policy():
    good, bad = RewardResult(score=1.0), RewardResult(score=math.inf)
    with custom(lambda jobs: [good, bad], on_failure="value", failure_value=-1) as rewards:
        results = rewards.score(jobs("a", "b"))
    assert results[0] == good
    assert (results[1].score, results[1].failure) == (-1.0, "returned the score inf, expected a finite number")


def test_f43_numpy_numbers_of_a_manager_count_and_parts_that_are_none_are_left_out():
    parts = {"acc": np.bool_(True), "margin": np.float32(0.5), "note": "good", "unknown": None, "far": math.inf}
    with custom(lambda jobs: [RewardResult(score=np.float32(2.5), parts=parts)]) as rewards:
        (result,) = rewards.score(jobs("a"))
    assert result == RewardResult(score=2.5, parts={"acc": 1.0, "margin": 0.5})
    assert {type(number) for number in (result.score, *result.parts.values())} == {float}


def test_a_manager_that_raises_is_named_with_its_line():
    def raises(jobs):
        raise KeyError("x")

    with (
        custom(raises) as rewards,
        pytest.raises(RewardError, match=r"rules.py:Custom failed for rows a.jsonl:0: KeyE"),
    ):
        rewards.score(jobs("a"))


def test_a_manager_that_ends_its_process_or_cannot_close_fails_as_one_that_raises():
    with custom(lambda jobs: sys.exit(0)) as rewards, pytest.raises(RewardError, match=r"a.jsonl:0: SystemExit: 0"):
        rewards.score(jobs("a"))
    for error in (SystemExit(0), KeyError("x")):

        def close(error=error):
            raise error

        rewards = custom(lambda jobs: [])
        rewards._manager.close = close
        with pytest.raises(
            RewardError, match=rf"^reward.manager=rules.py:Custom failed to close: {type(error).__name__}"
        ):
            rewards.close()
    with pytest.raises(ConfigError, match=r"reward.manager=rules.py:Leaves: SystemExit: 0"):
        make_rewards(RewardConfig(manager="rules.py:Leaves"))


def test_a_manager_that_cannot_be_made_is_a_config_error():
    with pytest.raises(ConfigError, match=r"reward.manager=rules.py:NoConfig: TypeError: "):
        make_rewards(RewardConfig(functions=[], manager="rules.py:NoConfig"))
    with pytest.raises(ConfigError, match=r"reward.manager=rules.py:NoClose has no method close"):
        make_rewards(RewardConfig(functions=[], manager="rules.py:NoClose"))
    with pytest.raises(ConfigError, match=r"reward.manager=rules.py:Nothing: rules.py has no 'Nothing'"):
        make_rewards(RewardConfig(functions=[], manager="rules.py:Nothing"))


def episodes(*outcomes):
    return [replace(job, outcome=outcome) for job, outcome in zip(jobs(*"2" * len(outcomes)), outcomes, strict=True)]


BROKEN = Answer(failure="step() failed: ValueError: no")


def test_what_an_environment_says_is_an_entry_like_others():
    functions = [{"type": "environment", "weight": 2.0}, "rules.py:number"]
    with Rewards(RewardConfig(functions=functions, num_workers=1)) as rewards:
        first, second = rewards.score(episodes(Answer(score=0.5, parts={"steps": 3.0}), Answer(score=-1.0)))
    assert first == RewardResult(score=3.0, parts={"environment/steps": 3.0, "environment": 0.5, "number": 2.0})
    assert second == RewardResult(score=0.0, parts={"environment": -1.0, "number": 2.0})
    with Rewards(RewardConfig(functions="rules.py:number", num_workers=1)) as rewards:
        (unread,) = rewards.score(episodes(Answer(score=0.5)))  # tools may answer without a reward of their own
    assert unread == RewardResult(score=2.0, parts={"number": 2.0})


def test_f41_an_environment_that_failed_is_a_failure_of_its_row_and_nothing_else_is_asked():
    functions = [{"type": "environment"}, "rules.py:never"]
    with Rewards(RewardConfig(functions=functions, num_workers=1, on_failure="mask", max_failure_rate=1)) as rewards:
        (result,) = rewards.score(episodes(BROKEN))
    assert result.failure == f"environment: {BROKEN.failure}; never: {BROKEN.failure}"
    with Rewards(RewardConfig(functions={"type": "environment"})) as rewards, pytest.raises(RewardError) as stopped:
        rewards.score(episodes(Answer(score=1.0), BROKEN))
    assert str(stopped.value).startswith("the environment failed for row a.jsonl:1: step() failed: ValueError: no. ")


def test_f41_a_manager_is_not_asked_about_an_environment_that_failed(monkeypatch):
    (manager := Path("manager.py")).write_text(
        RULES.replace("RETURNS(jobs)", "[RewardResult(score=float(len(jobs))) for _ in jobs]")
        + "\nfrom shardwise.rewards import RewardResult\n"
    )
    config = RewardConfig(functions=[], manager=f"{manager}:Custom", on_failure="value", failure_value=-7.0)
    with CustomRewards(config) as rewards:
        results = rewards.score(episodes(Answer(score=1.0), BROKEN, Answer(score=1.0)))
    assert [result.score for result in results] == [2.0, -7.0, 2.0]
    assert [result.failure is None for result in results] == [True, False, True]


def step(rewards, min_jobs, *calls):
    """The failures of every call of a step of at least so many jobs."""
    with rewards.counting_failures(min_jobs):
        return [[result.failure is not None for result in rewards.score(jobs(*texts))] for texts in calls]


def test_calls_of_a_step_share_one_rate():
    """A small late call may fail as a whole where all so far do not."""
    config = RewardConfig(functions=TWO[0], num_workers=1, on_failure="mask", max_failure_rate=0.4)
    with Rewards(config) as rewards:
        assert step(rewards, 3, ["1", "1", "1"], ["x", "y"]) == [[False] * 3, [True] * 2]
        assert step(rewards, 3, ["1", "1", "x"]) == [[False, False, True]]  # counted anew
        with pytest.raises(RewardError, match=r"^3 of 6 reward calls failed"):
            step(rewards, 3, ["1", "1", "x"], ["x", "y", "1"], ["1"] * 100)


def test_what_the_rest_of_the_first_calls_cannot_make_good_stops_at_once():
    config = RewardConfig(functions=TWO[0], num_workers=1, on_failure="mask", max_failure_rate=0.5)
    with Rewards(config) as rewards, pytest.raises(RewardError, match=r"^3 of 5 reward calls"):  # all so far: 3 of 4
        step(rewards, 5, ["x", "x", "1"], ["x"])


def test_a_managers_failures_are_counted_over_a_step_too():
    failed = RewardResult(score=0.0, failure="no")
    rewards = custom(lambda given: [failed] * len(given), on_failure="mask")
    with pytest.raises(RewardError, match=r"^2 of 3 reward calls"):
        step(rewards, 3, ["x"], ["x"])
