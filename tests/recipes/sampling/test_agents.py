"""Agents of all kinds against a scripted policy, through the endpoint as any client sees it."""

import asyncio
import http.client
import json
import random
import socket
import threading
import time
from contextlib import closing
from functools import partial
from urllib.parse import urlsplit

import pytest

from shardwise.config import AgentEnvironment, TrainingError
from shardwise.data import train_tokenizer
from shardwise.recipes.sampling.agents import Agents
from shardwise.types import Completion, Example, GenerateRequest

TOKENIZER = train_tokenizer(["2+3=5"], vocab_size=261)
END = TOKENIZER.eos_token_id


ROW = Example(uid="a", prompt_ids=[1], prompt="1", data_source="", ground_truth="")
REQUEST = GenerateRequest(uid="a", prompt_ids=[1], max_tokens=60, temperature=1.0)


def encoded(text):
    return TOKENIZER.encode(text, add_special_tokens=False)


class Policy:
    """Says a number that uid and prompt alone determine. Records every batch."""

    def __init__(self):
        self.batches = []

    def __call__(self, requests):
        self.batches.append(requests)
        return [[self._turn(request)] for request in requests]

    def _turn(self, request):
        number = random.Random(f"{request.uid}{request.prompt_ids}{request.seed}").randrange(100, 1000)
        token_ids = [*encoded(str(number)), END][: request.max_tokens]
        return Completion(
            token_ids=token_ids,
            logprobs=[-0.5] * len(token_ids),
            finish_reason="stop" if token_ids[-1] == END else "length",
            policy_version=4,
        )


def post(endpoint, *messages, timeout=10, **more):
    """Status and body of the answer to a chat request."""
    url = urlsplit(endpoint.base_url)
    connection = http.client.HTTPConnection(url.netloc, timeout=timeout)
    body = json.dumps({"model": endpoint.model, "messages": list(messages), **more})
    try:
        connection.request(
            "POST", f"{url.path}/chat/completions", body, {"Authorization": f"Bearer {endpoint.api_key}"}
        )
        response = connection.getresponse()
        return response.status, json.loads(response.read())
    finally:
        connection.close()


def say(endpoint, messages, text, **more):
    """Adds what the user says and what the policy answers; returns the answer."""
    messages.append({"role": "user", "content": text})
    status, body = post(endpoint, *messages, **more)
    if status != 200:
        raise RuntimeError(body["error"]["message"])
    messages.append(body["choices"][0]["message"])
    return messages[-1]["content"]


def talks(example, endpoint, *, num_turns=2):
    """A plain function. Its reward is what the policy said first."""
    messages = []
    said = [int(say(endpoint, messages, f"{example.prompt}{turn}")) for turn in range(num_turns)]
    return {"score": said[0], "turns": num_turns}


async def talks_too(example, endpoint, **parameters):
    return await asyncio.to_thread(talks, example, endpoint, **parameters)


def play(agent, *, prompts=("1",), group_size=1, max_tokens=60, policy=None, **options):
    policy = policy or Policy()
    config = AgentEnvironment(path="given.py:as_is", **{"timeout_seconds": 20, "max_wait_seconds": 0.05} | options)
    examples = [
        Example(uid=f"row {p}", prompt_ids=[int(p)], prompt=p, data_source="", ground_truth="", messages=[])
        for p in prompts
    ]
    requests = [
        GenerateRequest(
            uid=f"step 1/{place}/{example.uid}",
            prompt_ids=example.prompt_ids,
            num_completions=group_size,
            max_tokens=max_tokens,
            temperature=0.5,
            seed=3,
        )
        for place, example in enumerate(examples)
    ]
    with Agents(config, agent, TOKENIZER, policy, max_prompt_tokens=40) as agents:
        return agents.play(examples, requests), policy


def failure_of(agent, **options):
    """Of an agent beside one that does well."""

    def one_of_two(example, endpoint):
        return (agent if example.prompt == "1" else talks)(example, endpoint)

    ((bad,), (good,)), _ = play(one_of_two, prompts=("1", "2"), **options)
    assert (good.outcome.failure, good.completion.num_turns) == (None, 2)
    return bad.outcome.failure, bad


@pytest.mark.parametrize("agent", [talks, talks_too])
def test_what_an_agent_asks_becomes_its_completion_by_hand(agent):
    ((episode,),), policy = play(partial(agent, num_turns=3))
    completion = episode.completion
    assert completion.prompt_ids == encoded("<|user|>10<|end|><|assistant|>")
    observed = [encoded(f"<|user|>1{turn}<|end|><|assistant|>") for turn in (1, 2)]
    first, second, third = ([*encoded(turn), END] for turn in episode.turns)
    assert completion.token_ids == first + observed[0] + second + observed[1] + third
    assert [len(episode.turns), completion.num_turns, completion.policy_version] == [3, 3, 4]
    assert completion.num_sampled == len(first + second + third)
    assert (episode.outcome.score, episode.outcome.parts) == (float(episode.turns[0]), {"turns": 3.0})
    requests = [request for (request,) in policy.batches]
    assert [request.uid for request in requests] == [f"step 1/0/row 1/0/turn {turn}" for turn in range(3)]
    assert requests[2].prompt_ids == completion.prompt_ids + completion.token_ids[: -len(third)]
    assert requests[2].max_tokens == 60 - len(completion.token_ids) + len(third)


def test_what_an_agent_changes_in_its_row_is_its_own():
    """As the commonest line of agents does: `messages = example.messages`, and then appends."""

    def continues_the_row(example, endpoint):
        assert (example.messages, example.extra_info) == ([], {})
        say(endpoint, example.messages, example.prompt)
        example.extra_info["seen"] = True
        return 1.0

    (episodes,), _ = play(continues_the_row, group_size=3)
    assert [episode.outcome.failure for episode in episodes] == [None] * 3
    assert {tuple(episode.completion.prompt_ids) for episode in episodes} == {
        tuple(encoded("<|user|>1<|end|><|assistant|>"))
    }
    assert [episode.example.extra_info for episode in episodes] == [{}] * 3


def test_agents_that_wait_are_generated_for_together():
    (groups, policy) = play(talks, prompts=("1", "2"), group_size=3, max_wait_seconds=10)
    assert [len(batch) for batch in policy.batches] == [6, 6]
    assert [request.uid for request in policy.batches[0]] == [
        f"step 1/{p - 1}/row {p}/{index}/turn 0" for p in (1, 2) for index in range(3)
    ]
    assert [[episode.example.uid for episode in group] for group in groups] == [["row 1"] * 3, ["row 2"] * 3]


def test_what_is_sampled_does_not_depend_on_who_waits_with_whom():
    def dawdles(example, endpoint):
        time.sleep(random.random() / 5)
        return talks(example, endpoint, num_turns=3)

    found = []
    for options in ({}, {"max_wait_seconds": 0.001}, {"max_concurrent_calls": 1}):
        groups, policy = play(dawdles, prompts=("1", "2"), group_size=3, **options)
        found.append([[episode.completion.token_ids for episode in group] for group in groups])
    assert found[1:] == found[:1] * 2
    assert [len(batch) for batch in policy.batches] == [1] * 18  # one agent at a time
    assert len({tuple(token_ids) for group in found[0] for token_ids in group}) == 6


def test_an_agent_that_waits_is_not_kept_by_one_that_does_something_else():
    release = threading.Event()

    def works(example, endpoint):
        if example.prompt == "2":
            release.wait(10)
        reward = talks(example, endpoint)
        release.set()
        return reward

    groups, policy = play(works, prompts=("1", "2"))
    assert [len(batch) for batch in policy.batches] == [1] * 4
    assert all(group[0].outcome.failure is None for group in groups)


def test_a_blocking_client_in_a_coroutine_is_answered_all_the_same():
    """It holds the agents' event loop; the server has one of its own."""

    async def blocks(example, endpoint):
        return talks(example, endpoint)

    groups, _ = play(blocks, prompts=("1", "2"), group_size=2, timeout_seconds=5)
    assert [episode.outcome.failure for group in groups for episode in group] == [None] * 4


def test_a_client_that_comes_back_gets_the_answer_that_it_missed():
    release = threading.Event()

    class Slow(Policy):
        def __call__(self, requests):
            release.wait(5)
            return super().__call__(requests)

    def impatient(example, endpoint):
        message = {"role": "user", "content": "hello"}
        with pytest.raises(TimeoutError):
            post(endpoint, message, timeout=0.3)
        threading.Timer(0.3, release.set).start()
        _, first = post(endpoint, message)
        _, second = post(endpoint, message)
        assert first == second
        return 1

    ((episode,),), policy = play(impatient, policy=Slow())
    assert (episode.outcome.failure, episode.completion.num_turns, len(policy.batches)) == (None, 1, 1)


def test_streams_logprobs_and_models_are_served():
    def looks(example, endpoint):
        url = urlsplit(endpoint.base_url)
        connection = http.client.HTTPConnection(url.netloc)
        headers = {"Authorization": f"Bearer {endpoint.api_key}"}
        connection.request("GET", f"{url.path}/models", None, headers)
        assert json.loads(connection.getresponse().read())["data"][0]["id"] == endpoint.model
        user = {"role": "user", "content": "hello"}
        _, whole = post(endpoint, user, logprobs=True)
        assert [t["logprob"] for t in whole["choices"][0]["logprobs"]["content"]] == [-0.5] * 4
        assert whole["usage"]["completion_tokens"] == 4
        body = json.dumps({"model": endpoint.model, "messages": [user], "stream": True})
        connection = http.client.HTTPConnection(url.netloc)
        connection.request("POST", f"{url.path}/chat/completions", body, headers)
        *events, done = connection.getresponse().read().decode().strip().split("\n\n")
        assert done == "data: [DONE]"
        delta = json.loads(events[0].removeprefix("data: "))["choices"][0]["delta"]
        assert delta == whole["choices"][0]["message"]
        connection.request("GET", "/metrics", None, headers)
        assert connection.getresponse().status == 404
        return 1

    ((episode,),), _ = play(looks)
    assert episode.outcome.failure is None, episode.outcome.failure


def test_f63_a_key_is_of_one_episode_and_ends_with_it():
    seen = []

    def remembers(example, endpoint):
        seen.append(endpoint)
        return talks(example, endpoint)

    policy = Policy()
    with Agents(AgentEnvironment(path="a.py:b"), remembers, TOKENIZER, policy, max_prompt_tokens=40) as agents:
        agents.play([ROW, ROW], [REQUEST, REQUEST])
        assert len({endpoint.api_key for endpoint in seen}) == 2
        assert all(len(endpoint.api_key) >= 32 for endpoint in seen)
        for endpoint in seen:
            status, body = post(endpoint, {"role": "user", "content": "again"})
            assert (status, body["error"]["code"]) == (401, "invalid_api_key")
    assert len(policy.batches) == 2


def test_limits_count_as_truncated_and_an_agent_may_return_what_it_has_earned():
    def greedy(example, endpoint):
        messages = []
        try:
            while True:
                say(endpoint, messages, "more")
        except RuntimeError:
            return len(messages) // 2

    for options, told in (({"max_turns": 3, "max_tokens": 200}, 3), ({"max_tokens": 22}, 2)):
        ((episode,),), _ = play(greedy, **options)
        assert (episode.outcome.score, episode.completion.num_turns) == (told, told)
        assert episode.completion.finish_reason == "length"
        assert episode.completion.is_sampled[-1]


def test_an_agent_that_falls_over_a_limit_is_told_how_not_to():
    failure, _ = failure_of(partial(talks, num_turns=9), max_turns=2)
    assert failure.startswith("the agent failed: RuntimeError: the episode has had its rollout.environment.max_turns=2")
    assert "the endpoint had refused a further turn" in failure
    assert failure.endswith("which an agent may catch to return what it has earned so far")


def raises(example, endpoint):
    talks(example, endpoint)
    raise ValueError("the tool is away")


def exits(example, endpoint):
    raise SystemExit(3)


async def raises_later(example, endpoint):
    await asyncio.sleep(0.01)
    raise ValueError("the tool is away")


@pytest.mark.parametrize(
    ("agent", "failure"),
    [
        (raises, "the agent failed: ValueError: the tool is away (test_agents.py line "),
        (exits, "the agent failed: SystemExit: 3"),
        (lambda example, endpoint: 1.0, "the agent returned without having asked the policy for a turn"),
        (lambda example, endpoint: talks(example, endpoint) and "good", "the agent returned the str 'good', expected"),
        (lambda example: 1.0, "the agent failed: TypeError"),
    ],
)  # fmt: skip
def test_f47_an_agent_that_fails_fails_its_completion_alone(agent, failure):
    found, episode = failure_of(agent)
    assert found.startswith(failure)
    assert episode.completion.num_sampled == sum(episode.completion.is_sampled)


def test_f47_a_coroutine_that_fails_is_a_failure_too():
    async def mixed(example, endpoint):
        if example.prompt == "1":
            await raises_later(example, endpoint)
        return await talks_too(example, endpoint)

    ((bad,), (good,)), _ = play(mixed, prompts=("1", "2"))
    assert bad.outcome.failure.startswith("the agent failed: ValueError: the tool is away")
    assert good.outcome.failure is None


@pytest.mark.parametrize("stubborn", [False, True])
def test_f47_an_agent_that_hangs_costs_its_deadline_and_its_key(stubborn):
    """Also one that does not let itself be cancelled, and one that had a turn before."""
    release = threading.Event()

    async def hangs(example, endpoint):
        messages = []
        await asyncio.to_thread(say, endpoint, messages, "hello")
        while example.prompt == "1" and not release.is_set():
            try:
                await asyncio.sleep(0.01)
            except asyncio.CancelledError:
                if not stubborn:
                    raise
        return 1

    began = time.monotonic()
    ((bad,), (good,)), _ = play(hangs, prompts=("1", "2"), timeout_seconds=0.5)
    assert time.monotonic() - began < 12
    assert bad.outcome.failure == (
        "the agent made no request and no end within 0.5 s (rollout.environment.timeout_seconds)"
    )
    assert (bad.completion.num_turns, good.outcome.failure) == (1, None)
    release.set()


def test_f47_a_thread_that_hangs_keeps_nobody():
    release = threading.Event()

    def hangs(example, endpoint):
        release.wait(30)

    failure, _ = failure_of(hangs, timeout_seconds=0.5)
    release.set()
    assert "no request and no end within 0.5 s" in failure


def test_f47_time_that_the_policy_takes_is_not_the_agents():
    class Slow(Policy):
        def __call__(self, requests):
            time.sleep(0.6)
            return super().__call__(requests)

    ((episode,),), _ = play(talks, policy=Slow(), timeout_seconds=0.5)
    assert episode.outcome.failure is None


def test_f47_an_agent_that_sends_nonsense_is_refused_and_may_go_on():
    def clumsy(example, endpoint):
        url = urlsplit(endpoint.base_url)
        head = f"POST {url.path}/chat/completions HTTP/1.1\r\nAuthorization: Bearer {endpoint.api_key}\r\n".encode()
        for data in (head + b"Content-Length: 9\r\n\r\nnonsense!", head + b"\r\n", b"\0" * 100 + b"\r\n\r\n"):
            with socket.create_connection((url.hostname, url.port)) as sock:
                sock.sendall(data)
                assert b"HTTP/1.1 4" in sock.recv(4096)
        for given, status in (({"n": 3}, 400), ({"temperature": 1.5}, 400), ({"model": "gpt"}, 404)):
            assert post(endpoint, {"role": "user", "content": "hello"}, **given)[0] == status
        assert post(endpoint, {"role": "user", "content": "x" * 20_000_000})[0] == 413
        return talks(example, endpoint)

    ((episode,),), policy = play(clumsy)
    assert episode.outcome.failure is None, episode.outcome.failure
    assert len(policy.batches) == 2


def test_f47_a_client_that_drips_waits_alone():
    def drips(example, endpoint):
        url = urlsplit(endpoint.base_url)
        sock = socket.create_connection((url.hostname, url.port))
        for byte in b"POST /v1/chat/completions HTTP/1.1\r\n" * 100:
            sock.sendall(bytes([byte]))
            time.sleep(0.02)

    failure, _ = failure_of(drips, timeout_seconds=0.5)
    assert "no request and no end within 0.5 s" in failure


def test_agents_that_never_ask_stop_the_run_with_the_reason_of_the_first():
    told = r"none of 2 agents asked .* row 1: the agent failed: ValueError: the tool.*\. Fix the agent, .*path=given"
    with pytest.raises(TrainingError, match=told):
        play(raises_later, group_size=2)


@pytest.mark.parametrize("scheme", ["Bearer wrong", "Basic"])
def test_agents_without_the_key_of_their_episode_stop_the_run_which_says_so(scheme):
    def asks_with_another_key(example, endpoint):
        url = urlsplit(endpoint.base_url)
        with closing(http.client.HTTPConnection(url.netloc, timeout=10)) as connection:
            connection.request("GET", f"{url.path}/models", headers={"Authorization": f"{scheme}{endpoint.api_key}"})
            raise RuntimeError(f"status {connection.getresponse().status}")

    told = r"RuntimeError: status 401.*\. The endpoint refused requests without the key .* client endpoint\.api_key$"
    with pytest.raises(TrainingError, match=told):
        play(asks_with_another_key, group_size=2)


def test_where_generation_fails_agents_are_told_and_ended():
    told = []

    def records(example, endpoint):
        told.append(post(endpoint, {"role": "user", "content": "hello"}))

    def broken(requests):
        raise RuntimeError("a rank is gone")

    with Agents(AgentEnvironment(path="a.py:b"), records, TOKENIZER, broken, max_prompt_tokens=40) as agents:
        with pytest.raises(RuntimeError, match="a rank is gone"):
            agents.play([ROW], [REQUEST])
        deadline = time.monotonic() + 5
        while not told and time.monotonic() < deadline:
            time.sleep(0.01)
    ((status, body),) = told
    assert (status, body["error"]["code"]) == (503, "episode_over")


def test_coroutines_of_a_run_share_an_event_loop():
    loops = []

    async def looks(example, endpoint):
        loops.append(asyncio.get_running_loop())
        return await talks_too(example, endpoint)

    with Agents(AgentEnvironment(path="a.py:b"), looks, TOKENIZER, Policy(), max_prompt_tokens=40) as agents:
        for _ in range(2):
            agents.play([ROW], [REQUEST])
    assert len(set(loops)) == 1
    assert len(loops) == 2
    assert loops[0].is_closed()


def asks_with_openai(example, endpoint):
    openai = pytest.importorskip("openai")
    client = openai.OpenAI(base_url=endpoint.base_url, api_key=endpoint.api_key, max_retries=0)
    messages, said = [], []
    for text in ("a", "b"):
        messages.append({"role": "user", "content": text})
        answer = client.chat.completions.create(model=endpoint.model, messages=messages)
        messages.append({"role": "assistant", "content": answer.choices[0].message.content})
        said.append(int(messages[-1]["content"]))
    with pytest.raises(openai.AuthenticationError):
        openai.OpenAI(base_url=endpoint.base_url, api_key="another", max_retries=0).chat.completions.create(
            model=endpoint.model, messages=messages
        )
    return {"score": said[0], "second": said[1]}


async def streams_with_openai(example, endpoint):
    openai = pytest.importorskip("openai")
    client = openai.AsyncOpenAI(base_url=endpoint.base_url, api_key=endpoint.api_key, max_retries=0)
    asked = [{"role": "user", "content": "a"}]
    chunks = await client.chat.completions.create(model=endpoint.model, messages=asked, stream=True)
    return {"score": int("".join([chunk.choices[0].delta.content or "" async for chunk in chunks if chunk.choices]))}


@pytest.mark.parametrize(("agent", "num_turns"), [(asks_with_openai, 2), (streams_with_openai, 1)])
def test_openais_own_client_plays_episodes(agent, num_turns):
    """`make test-agents` has it."""
    pytest.importorskip("openai")
    ((episode,),), policy = play(agent)
    assert episode.outcome.failure is None
    assert episode.completion.num_turns == num_turns
    said = TOKENIZER.decode(episode.completion.token_ids, skip_special_tokens=True)
    assert said.startswith(str(int(episode.outcome.score)))
    assert len(policy.batches) == num_turns
