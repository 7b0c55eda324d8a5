"""Completions of several turns, against scripts."""

import asyncio
import time
from functools import partial

import pytest

from shardwise.config import CustomEnvironment
from shardwise.recipes.sampling.episodes import Episodes
from shardwise.types import Completion, Example, GenerateRequest

END = 9


class Digits:
    """A tokenizer whose tokens are digits; 9 ends a turn."""

    def decode(self, token_ids, skip_special_tokens=False):
        return "".join(str(token) for token in token_ids if not (skip_special_tokens and token == END))

    def get_vocab(self):
        return {str(digit): digit for digit in range(10)}

    def convert_ids_to_tokens(self, token_ids):
        return [str(token) for token in token_ids]

    def encode(self, text, add_special_tokens):
        assert not add_special_tokens
        return [int(character) for character in text]


class Policy:
    """Says the digits of its script, turn after turn; a script is found by the uid of the request."""

    def __init__(self, scripts):
        self._scripts = {uid: list(turns) for uid, turns in scripts.items()}
        self.requests = []

    def again(self, scripts):
        self.__init__(scripts)

    def __call__(self, requests):
        self.requests.append(requests)
        return [
            [self._turn(request, f"{request.uid}/{n}" if len(self.requests) == 1 else request.uid) for n in range(size)]
            for request in requests
            for size in [request.num_completions]
        ]

    def _turn(self, request, uid):
        token_ids = [*map(int, self._scripts[uid].pop(0))][: request.max_tokens]
        reason = "stop" if token_ids[-1] == END else "length"
        logprobs = [-0.1 * token for token in token_ids]
        return Completion(token_ids=token_ids, logprobs=logprobs, finish_reason=reason, policy_version=4)


made = []
"""Every environment of a test."""


class Echo:
    """Answers a turn with 7 and its digits, until it hears the number it waits for; records what it is told."""

    def __init__(self, *, fails_in=None):
        self.calls, self._fails_in = [], fails_in
        made.append(self)

    def _record(self, *call):
        self.calls.append(call)
        if call[0] == self._fails_in:
            raise ValueError(f"broken {call[0]}")

    def reset(self, example):
        self._record("reset", example.uid)
        self._awaited = example.ground_truth

    async def step(self, response):
        self._record("step", response)
        return None if response == self._awaited else f"7{response}"

    def reward(self):
        self._record("reward")
        return {"score": 0.5, "steps": sum(call[0] == "step" for call in self.calls)}

    def close(self):
        self._record("close")


@pytest.fixture(autouse=True)
def nobody():
    made.clear()


def play(scripts, *, prompts=("1",), awaited="3", group_size=1, max_tokens=20, environment=Echo, **options):
    policy = Policy(scripts)
    config = CustomEnvironment(path="given.py:AsIs", **options)
    with Episodes(config, partial(environment, **config.parameters), Digits(), policy) as episodes:
        return play_all(episodes, prompts, awaited, group_size, max_tokens), policy


def play_all(episodes, prompts=("1",), awaited="3", group_size=1, max_tokens=20):
    examples = [
        Example(uid=f"row {p}", prompt_ids=[int(p)], prompt=p, data_source="", ground_truth=awaited) for p in prompts
    ]
    requests = [
        GenerateRequest(
            uid=example.uid,
            prompt_ids=example.prompt_ids,
            num_completions=group_size,
            max_tokens=max_tokens,
            temperature=0.5,
            seed=3,
        )
        for example in examples
    ]
    return episodes.play(examples, requests)


def test_turns_and_observations_become_one_completion_by_hand():
    (((episode,)), policy) = play({"row 1/0": ["249", "39"]})
    completion = episode[0].completion
    assert completion.token_ids == [2, 4, 9, 7, 2, 4, 3, 9]
    assert completion.is_sampled == [True] * 3 + [False] * 3 + [True] * 2
    assert completion.logprobs == pytest.approx([-0.2, -0.4, -0.9, 0, 0, 0, -0.3, -0.9])
    assert (completion.turn_starts, completion.num_sampled, completion.finish_reason) == ([0, 6], 5, "stop")
    assert episode[0].ids_before_last_turn == completion.token_ids[:6]
    assert completion.policy_version == 4
    assert episode[0].turns == ["24", "3"]
    assert episode[0].said == [
        {"role": "assistant", "content": "24"},
        {"role": "user", "content": "724"},
        {"role": "assistant", "content": "3"},
    ]
    assert (episode[0].outcome.score, episode[0].outcome.parts, episode[0].outcome.failure) == (
        0.5,
        {"steps": 2.0},
        None,
    )
    first, second = policy.requests
    assert [(r.uid, r.prompt_ids, r.max_tokens) for r in first] == [("row 1", [1], 20)]
    assert [(r.uid, r.prompt_ids, r.max_tokens, r.num_completions, r.temperature, r.seed) for r in second] == [
        ("row 1/0", [1, 2, 4, 9, 7, 2, 4], 14, 1, 0.5, 3)
    ]
    assert made[0].calls == [("reset", "row 1"), ("step", "24"), ("step", "3"), ("reward",), ("close",)]


def test_what_an_environment_changes_in_its_row_is_its_own():
    """Else the next epoch would see it, and a run that was resumed would not."""

    class Counts(Echo):
        def reset(self, example):
            super().reset(example)
            example.extra_info["count"] = example.extra_info.get("count", 0) + 1
            self._count = example.extra_info["count"]

        def reward(self):
            return float(self._count)

    ((episodes,), _) = play({"row 1/0": ["39"], "row 1/1": ["39"]}, group_size=2, environment=Counts)
    assert [episode.outcome.score for episode in episodes] == [1.0, 1.0]
    assert episodes[0].example.extra_info == {}


def test_episodes_of_different_lengths_are_played_together():
    scripts = {
        "row 1/0": ["39"],
        "row 1/1": ["49", "39"],
        "row 2/0": ["59", "49", "39"],
        "row 2/1": ["39"],
    }
    groups, policy = play(scripts, prompts=("1", "2"), group_size=2)
    assert [[episode.completion.num_turns for episode in group] for group in groups] == [[1, 2], [3, 1]]
    assert [[episode.example.uid for episode in group] for group in groups] == [["row 1"] * 2, ["row 2"] * 2]
    assert [[request.uid for request in requests] for requests in policy.requests] == [
        ["row 1", "row 2"],
        ["row 1/1", "row 2/0"],
        ["row 2/0"],
    ]
    assert len(made) == 4
    assert all(environment.calls[-1] == ("close",) for environment in made)


@pytest.mark.parametrize(
    ("options", "token_ids", "num_steps"),
    [
        ({"max_turns": 1}, [2, 9], 1),
        ({"max_turns": 2}, [2, 9, 7, 2, 4, 9], 2),
        ({"max_tokens": 4}, [2, 9], 1),  # the observation would leave no room for a turn
        ({"max_tokens": 5}, [2, 9, 7, 2, 4], 1),  # the second turn is cut, so it is not a turn to answer
    ],
)
def test_limits_end_an_episode_which_is_scored_as_far_as_it_came(options, token_ids, num_steps):
    ((episode,),), _ = play({"row 1/0": ["29", "49", "39"]}, **options)
    assert episode.completion.token_ids == token_ids
    assert episode.completion.finish_reason == "length"
    assert episode.outcome.parts == {"steps": num_steps}
    assert made[0].calls[-2:] == [("reward",), ("close",)]


@pytest.mark.parametrize("num_chars", [10, 5_000_000])
def test_f47_an_answer_longer_than_the_tokens_left_could_be_ends_the_episode_before_it_is_tokenized(num_chars):
    """Two of 12 tokens are used, and a token is a character: 10 are read and leave no room, more are not read."""
    read = []

    class Watched(Digits):
        def encode(self, text, add_special_tokens):
            read.append(len(text))
            return super().encode(text, add_special_tokens)

    class Floods(Echo):
        async def step(self, response):
            return num_chars * "7"

    with Episodes(CustomEnvironment(path="a.py:B"), Floods, Watched(), Policy({"row 1/0": ["29"]})) as episodes:
        ((episode,),) = play_all(episodes, max_tokens=12)
    assert read == ([10] if num_chars == 10 else [])
    assert (episode.completion.token_ids, episode.completion.finish_reason) == ([2, 9], "length")
    assert (episode.outcome.score, episode.outcome.failure) == (0.5, None)


@pytest.mark.parametrize("method", ["reset", "step", "reward", "close"])
def test_an_environment_that_fails_fails_its_episode_and_is_closed(method):
    ((episode,),), _ = play({"row 1/0": ["29", "39"]}, parameters={"fails_in": method})
    assert episode.outcome.failure.startswith(f"{method}() failed: ValueError: broken {method}")
    assert made[0].calls[-1] == ("close",)
    assert ("reward",) not in made[0].calls or method in ("reward", "close")


@pytest.mark.parametrize(
    ("step", "failure"),
    [
        (lambda self, response: time.sleep(1), "TimeoutError: no answer within 0.1 s"),
        (lambda self: None, "TypeError: <lambda>() takes 1 positional argument but 2 were given"),
    ],
)
def test_f41_what_is_raised_before_a_line_of_the_environment_is_reached_names_no_line(step, failure):
    environment = type("Other", (Echo,), {"step": step})
    ((episode,),), _ = play({"row 1/0": ["29"]}, timeout_seconds=0.1, environment=environment)
    assert episode.outcome.failure == f"step() failed: {failure}"


def test_an_answer_that_spells_a_token_of_images_fails_its_episode_alone():
    scripts = {"row 1/0": ["489"], "row 1/1": ["49", "39"]}  # the environment says 748 and 74
    policy, config = Policy(scripts), CustomEnvironment(path="a.py:B")
    with Episodes(config, Echo, Digits(), policy, media_token_ids=[8]) as episodes:
        ((bad, good),) = play_all(episodes, group_size=2)
    assert bad.outcome.failure.startswith(
        "step() returned what cannot be read: the environment's answer: the text spells '8', by which the model knows"
    )
    assert (bad.completion.token_ids, made[0].calls[-1]) == ([4, 8, 9], ("close",))
    assert (good.outcome.failure, good.completion.num_turns) == (None, 2)


def test_one_failure_leaves_the_other_episodes_alone():
    class FailsOnTwo(Echo):
        async def step(self, response):
            if response == "2":
                raise RuntimeError("two")
            return await super().step(response)

    ((bad, good),), _ = play({"row 1/0": ["29"], "row 1/1": ["49", "39"]}, group_size=2, environment=FailsOnTwo)
    assert bad.outcome.failure.startswith("step() failed: RuntimeError: two")
    assert (good.outcome.failure, good.completion.num_turns) == (None, 2)


@pytest.mark.parametrize(
    ("observation", "told"), [(5, "the observation is a number"), (["x"], "the observation is a list")]
)
def test_an_observation_of_another_kind_is_a_failure(observation, told):
    class Odd(Echo):
        async def step(self, response):
            return observation

    ((episode,),), _ = play({"row 1/0": ["29"]}, environment=Odd)
    assert told in episode.outcome.failure


def test_a_reward_of_another_kind_is_a_failure():
    class Odd(Echo):
        def reward(self):
            return "good"

    ((episode,),), _ = play({"row 1/0": ["39"]}, environment=Odd)
    assert episode.outcome.failure.startswith("reward() returned the str 'good', expected a finite number")


def test_an_environment_that_cannot_be_made_fails_its_episode_alone():
    class ThirdFails(Echo):
        def __init__(self):
            if len(made) == 2:
                made.append(None)
                raise OSError("no room")
            super().__init__()

    scripts = {f"row 1/{index}": ["39"] for index in range(4)}
    (group,), _ = play(scripts, group_size=4, environment=ThirdFails)
    failures = [episode.outcome.failure for episode in group]
    assert sum(failure is not None for failure in failures) == 1
    assert next(filter(None, failures)).startswith("__init__() failed: OSError: no room")
    assert [environment.calls[-1] for environment in made if environment is not None] == [("close",)] * 3


def test_environments_are_closed_where_generation_fails():
    def broken(requests):
        raise RuntimeError("a rank is gone")

    with (
        Episodes(CustomEnvironment(path="a.py:B"), Echo, Digits(), broken) as episodes,
        pytest.raises(RuntimeError, match="a rank is gone"),
    ):
        play_all(episodes, group_size=3)
    assert [environment.calls for environment in made] == [[("reset", "row 1"), ("close",)]] * 3


def test_steps_of_a_run_share_an_event_loop():
    """What environments share, such as a client, belongs to the loop it was made in."""
    loops = []

    class Looks(Echo):
        async def step(self, response):
            loops.append(asyncio.get_running_loop())

    policy = Policy({"row 1/0": ["39"]})
    with Episodes(CustomEnvironment(path="a.py:B"), Looks, Digits(), policy) as episodes:
        play_all(episodes)
        policy.again({"row 1/0": ["39"]})
        play_all(episodes)
    assert len(loops) == 2
    assert loops[0] is loops[1]
    assert loops[0].is_closed()


def test_what_the_last_turn_answers_includes_turns_that_were_answered_with_nothing():
    class Silent(Echo):
        async def step(self, response):
            return None if response == self._awaited else ""

    (((episode,),), _) = play({"row 1/0": ["249", "59", "39"]}, environment=Silent)
    assert episode.completion.token_ids == [2, 4, 9, 5, 9, 3, 9]
    assert episode.ids_before_last_turn == [2, 4, 9, 5, 9]


def test_what_the_last_turn_answers_is_everything_before_it():
    ((episode,),), _ = play({"row 1/0": ["249", "59", "39"]})
    assert episode.completion.token_ids == [2, 4, 9, 7, 2, 4, 5, 9, 7, 5, 3, 9]
    assert episode.ids_before_last_turn == [2, 4, 9, 7, 2, 4, 5, 9, 7, 5]
    ((episode,),), _ = play({"row 1/0": ["39"]})
    assert episode.ids_before_last_turn == []
