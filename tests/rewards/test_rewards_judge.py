"""Against a server on the loopback interface that behaves as badly as it is told to."""

import json
import socket
import struct
import threading
import time
from contextlib import suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from shardwise.config import ConfigError, JudgeLostError, JudgeReward, RewardConfig, RewardError, UserError
from shardwise.rewards import RewardJob, Rewards
from shardwise.rewards import judge as judge_module
from shardwise.rewards.judge import Judge, TokenBucket, fill_template, parse_score, retry_pause


def chat(text):
    return json.dumps({"choices": [{"message": {"content": text}}]}).encode()


class Handler(BaseHTTPRequestHandler):
    def do_POST(self):
        server = self.server
        request = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        with server.lock:
            server.requests.append((time.monotonic(), self.path, dict(self.headers), request))
            script = server.script
            action = script.pop(0) if len(script) > 1 else script[0]
        with suppress(OSError):
            action(self)

    def reply(self, body, status=200, **headers):
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name.replace("_", "-"), value)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *args):
        pass


def says(text):
    return lambda handler: handler.reply(chat(text))


def status(code, **headers):
    return lambda handler: handler.reply(b'{"error": "no\\nluck"}', code, **headers)


def reset(handler):
    # Linger 0 makes close send a reset instead of an orderly end.
    handler.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    handler.connection.close()


def hangs(handler):
    handler.server.released.wait(20)


def drips(handler):
    """One byte at a time: no single read ever waits long."""
    handler.wfile.write(b"HTTP/1.0 200 OK\r\nConnection: close\r\n\r\n")
    while not handler.server.released.wait(0.05):
        handler.wfile.write(b" ")


def huge(handler):
    handler.wfile.write(b"HTTP/1.0 200 OK\r\nConnection: close\r\n\r\n")
    while True:
        handler.wfile.write(b"x" * 100_000)


@pytest.fixture
def server():
    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.script, server.requests, server.lock, server.released = (
        [says("Score: 1")],
        [],
        threading.Lock(),
        threading.Event(),
    )
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    yield server
    server.released.set()
    server.shutdown()
    thread.join()
    server.server_close()


@pytest.fixture(autouse=True)
def _short_pauses(monkeypatch):
    monkeypatch.setattr(judge_module, "FIRST_PAUSE_SECONDS", 0.01)


def config(server, **settings):
    return {
        "type": "judge",
        "base_url": f"http://127.0.0.1:{server.server_address[1]}/v1",
        "model": "grader",
        "prompt_template": "{prompt}|{completion}|{ground_truth}|{other}",
        "requests_per_second": 1000,
        "timeout_seconds": 5,
        **settings,
    }


JOB = RewardJob(uid="a:1", prompt="2+3?", data_source="", solution_str="{prompt} 5", ground_truth=5)


def ask(server, *actions, num_jobs=1, **settings):
    server.script = list(actions)
    judge = Judge(JudgeReward(**config(server, **settings)))
    try:
        answers = dict(judge.score([JOB] * num_jobs))
        return [answers[place] for place in range(num_jobs)]
    finally:
        judge.close()


def test_a_request_is_the_filled_template_and_the_last_score_counts(server, monkeypatch):
    monkeypatch.setenv("JUDGE_KEY", " secret \n")
    (answer,) = ask(server, says("Score: 3. No, score: 8"), api_key_env="JUDGE_KEY", score_scale=10, max_tokens=7)
    assert (answer.score, answer.failure) == (0.8, None)
    ((_, path, headers, request),) = server.requests
    assert path == "/v1/chat/completions"
    assert headers["Authorization"] == "Bearer secret"
    assert request == {
        "model": "grader",
        "messages": [{"role": "user", "content": "2+3?|{prompt} 5|5|{other}"}],
        "temperature": 0.0,
        "max_tokens": 7,
    }


@pytest.mark.parametrize(
    "trouble",
    [status(500), status(503), status(429, Retry_After="0"), status(408), reset, lambda h: h.reply(b"<html>")],
    ids=["500", "503", "429", "408", "reset", "garbage"],
)
def test_f47_trouble_of_the_endpoint_is_asked_again(server, trouble):
    (answer,) = ask(server, trouble, trouble, says("Score: 0.5"), max_retries=2)
    assert (answer.score, answer.failure, len(server.requests)) == (0.5, None, 3)


@pytest.mark.alone
@pytest.mark.parametrize(
    ("action", "settings", "num_requests", "failure"),
    [
        (status(500), {}, 2, "the endpoint answered with status 500: {\"error\": \"no\\nluck\"} (2 attempts)"),
        (status(401), {}, 1, "the endpoint answered with status 401: {\"error\": \"no\\nluck\"}"),
        (status(307, Location="http://127.0.0.1:1/"), {}, 1, "the endpoint answered with status 307"),
        (reset, {}, 2, "the connection failed: ConnectionResetError: "),
        (hangs, {"timeout_seconds": 1.0}, 2, "no full answer within 1 s (2 attempts)"),
        (drips, {"timeout_seconds": 1.0}, 2, "no full answer within 1 s (2 attempts)"),
        (huge, {"max_response_bytes": 1000}, 1, "the answer is larger than max_response_bytes=1000"),
        (says("I like it"), {}, 1, "no score in the judge's answer (score_pattern): I like it"),
        (says("Score: " + "9" * 400), {}, 1, "no score in the judge's answer"),
        (lambda h: h.reply(b'{"choices": []}'), {}, 2, "no chat completion in the answer: "),
        (lambda h: h.reply(b'{"choices": [{"message": {"content": null}}]}'), {}, 2, "no chat completion in the"),
    ],
    ids=["500", "401", "redirect", "reset", "hangs", "drips", "huge", "no score", "infinite", "no choices", "null"],
)  # fmt: skip
def test_f47_what_does_not_get_better_is_a_failure_that_says_why(server, action, settings, num_requests, failure):
    began = time.monotonic()
    (answer,) = ask(server, action, max_retries=1, **settings)
    assert answer.failure.startswith(failure)
    assert len(answer.failure) < 800
    assert len(server.requests) == num_requests
    assert time.monotonic() - began < 4


@pytest.fixture
def nobody():
    """An endpoint where nobody listens."""
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        yield {
            "type": "judge",
            "base_url": f"http://127.0.0.1:{unused.getsockname()[1]}/v1",
            "model": "m",
            "prompt_template": "{completion}",
            "max_retries": 0,
        }


def test_nobody_listening_is_a_failure(nobody):
    judge = Judge(JudgeReward(**nobody))
    ((_, answer),) = judge.score([JOB])
    judge.close()
    assert answer.failure.startswith("cannot connect to 127.0.0.1:")
    assert answer.may_pass


@pytest.mark.parametrize(("name", "who"), [("judge", "reward judge"), ("strict", "reward judge strict")])
def test_a_judge_that_cannot_be_reached_is_no_mistake_of_the_users(nobody, name, who):
    """The same command may do better, so the job ends with code 1 and --max-restarts counts. Nor may it be a
    RuntimeError, whose words of connections would be taken for those of a lost rank."""
    with (
        Rewards(RewardConfig(functions=[{**nobody, "name": name}])) as rewards,
        pytest.raises(JudgeLostError) as caught,
    ):
        rewards.score([JOB])
    assert not isinstance(caught.value, UserError | RuntimeError | OSError)
    shown = str(caught.value)
    assert shown.startswith(f"{who} failed for row a:1: cannot connect to 127.0.0.1:")
    assert shown.endswith(
        "(1 attempts). Check its base_url, model and api_key_env, raise its max_retries or timeout_seconds, or set "
        "reward.on_failure=value to score such rows reward.failure_value=0, or =mask to leave them out"
    )


@pytest.mark.parametrize(
    ("trouble", "kind"),
    [
        (status(503), JudgeLostError),
        (status(429), JudgeLostError),
        (reset, JudgeLostError),
        (hangs, JudgeLostError),
        (status(401), RewardError),
        (says("I like it"), RewardError),
        (lambda h: h.reply(b"<html>"), RewardError),
    ],
    ids=["503", "429", "reset", "hangs", "401", "no score", "garbage"],
)
def test_what_a_judge_refuses_or_says_is_a_mistake_and_trouble_of_the_endpoint_is_none(server, trouble, kind):
    server.script = [trouble]
    settings = config(server, max_retries=1, timeout_seconds=0.5)
    with Rewards(RewardConfig(functions=[settings])) as rewards, pytest.raises(kind) as caught:
        rewards.score([JOB])
    assert isinstance(caught.value, UserError) == (kind is RewardError)
    if kind is RewardError:
        assert "Check its base_url, model, api_key_env, prompt_template and score_pattern, or" in str(caught.value)


@pytest.mark.parametrize(
    ("script", "kind"), [([503], JudgeLostError), ([401, 503], JudgeLostError), ([401], RewardError)]
)
def test_too_many_failures_are_a_mistake_only_where_lasting_ones_are_too_many(server, script, kind):
    """Of four calls one may fail; the last status goes on."""
    server.script = [status(code) for code in script]
    settings = config(server, max_retries=0, max_concurrent_requests=1)
    rewards = RewardConfig(functions=[settings], on_failure="mask", max_failure_rate=0.25)
    with Rewards(rewards) as judged, pytest.raises(kind, match=r"^2 of 4 reward calls failed"):
        judged.score([JOB] * 4)


def test_no_more_requests_are_under_way_than_may_be(server):
    """Each waits for two others, and counts until it is answered."""
    meeting, counting, counts = threading.Barrier(3), threading.Lock(), [0]

    def count(change):
        with counting:
            counts.append(counts[-1] + change)

    def meet(handler):
        count(+1)
        meeting.wait(20)
        time.sleep(0.02)  # in which one too many would come
        count(-1)
        handler.reply(chat("Score: 1"))

    answers = ask(server, meet, num_jobs=30, max_concurrent_requests=3, timeout_seconds=20, max_retries=0)
    assert all(answer.score == 1.0 for answer in answers)
    assert max(counts) == 3


def test_the_rate_is_bounded_over_all_threads(server):
    """A second's worth at once, the other ten at 20 a second."""
    began = time.monotonic()
    answers = ask(server, says("Score: 1"), num_jobs=30, requests_per_second=20, max_concurrent_requests=3)
    assert all(answer.score == 1.0 for answer in answers)
    assert server.requests[-1][0] - began > 0.45


@pytest.mark.alone
def test_a_server_that_asks_for_a_pause_gets_it(server):
    ask(server, status(429, Retry_After="1"), says("Score: 1"))
    (first, *_), (second, *_) = server.requests
    assert 0.95 < second - first < 3


def test_pauses_double_are_random_and_bounded(monkeypatch):
    monkeypatch.setattr(judge_module, "FIRST_PAUSE_SECONDS", 0.5)
    for attempt, most in enumerate([0.5, 1.0, 2.0, 4.0, 8.0, 16.0, 30.0, 30.0]):
        pauses = [retry_pause(attempt, None) for _ in range(200)]
        assert 0.8 * most < max(pauses) <= most
        assert min(pauses) < 0.2 * most
    assert retry_pause(0, 7.0) == 7.0
    assert retry_pause(0, 3600.0) == 30.0


def test_token_bucket_hands_out_a_seconds_worth_and_then_one_by_one(monkeypatch):
    now = 100.0
    monkeypatch.setattr(judge_module.time, "monotonic", lambda: now)
    bucket = TokenBucket(4.0)
    assert [bucket.reserve() for _ in range(7)] == [0.0, 0.0, 0.0, 0.0, 0.25, 0.5, 0.75]
    now = 1000.0
    assert [bucket.reserve() for _ in range(6)] == [0.0, 0.0, 0.0, 0.0, 0.25, 0.5]
    slow = TokenBucket(0.5)
    assert [slow.reserve() for _ in range(3)] == [0.0, 2.0, 4.0]


def test_the_completion_cannot_fill_the_template():
    assert fill_template("{completion}", JOB) == "{prompt} 5"


@pytest.mark.parametrize(
    ("text", "score"),
    [
        ("score=-1.5", -1.5),
        ("SCORE : 2", 2.0),
        ("none", None),
        ("score: x score: 3", 3.0),
        ("**Score:** 8", 8.0),
        ("**Score**: 8", 8.0),
        ("Score: **8**", 8.0),
        ("__Score:__ 8", 8.0),
        ('{"score": 8}', 8.0),
        ("Score:\n\n`-8.5`", -8.5),
        ("Score: \u22128", -8.0),
        ("Score: .5", 0.5),
        ("Score: -.5", -0.5),
        ("Score: 1e1", 10.0),
        ("Score: 25e-1.", 2.5),
        ("Score: 8.", 8.0),
        ("Score: 8/10", 8.0),
        ("Score: **8**/10", 8.0),
        ("Score: _/10", None),
        ("Score: \u20138", None),  # a dash may mean a minus
        ("Score: - 8", None),
        ("Score: low, 3 of 10", None),
    ],
)
def test_parse_score_by_hand(text, score):
    assert parse_score(text, JudgeReward.model_fields["score_pattern"].default) == score


def test_the_key_comes_from_the_environment_and_is_in_no_dump(server, monkeypatch):
    entry = config(server, api_key_env="JUDGE_KEY")
    monkeypatch.delenv("JUDGE_KEY", raising=False)
    with pytest.raises(ConfigError, match="api_key_env=JUDGE_KEY, but that environment variable is not set"):
        Judge(JudgeReward(**entry))
    monkeypatch.setenv("JUDGE_KEY", "sec\nret")
    with pytest.raises(ConfigError) as caught:
        Judge(JudgeReward(**entry))
    assert "ret" not in str(caught.value).replace("retr", "")
    monkeypatch.setenv("JUDGE_KEY", "secret")
    assert "secret" not in RewardConfig(functions=[entry]).model_dump_json()


def test_a_judge_goes_by_the_policies_like_a_function(server):
    server.script = [status(401), says("Score: 0.5")]
    entry = config(server, weight=2, max_concurrent_requests=1)
    functions = ["shardwise.rewards.math:exact_match", entry]
    with Rewards(RewardConfig(functions=functions, num_workers=1, on_failure="value", failure_value=-1)) as rewards:
        first, second = rewards.score([JOB, JOB])
    assert (first.score, first.parts) == (-2.0, {"exact_match": 0.0})
    assert first.failure.startswith("judge: the endpoint answered with status 401")
    assert (second.score, second.parts) == (1.0, {"exact_match": 0.0, "judge": 0.5})


@pytest.mark.alone
def test_closing_breaks_off_requests_that_are_under_way(server):
    server.script = [hangs]
    judge = Judge(JudgeReward(**config(server, timeout_seconds=60)))
    judge.score([JOB] * 3)
    while len(server.requests) < 3:
        time.sleep(0.01)
    began = time.monotonic()
    judge.close()
    assert time.monotonic() - began < 2
