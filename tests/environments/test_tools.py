"""Tools, as an environment calls them for a policy."""

import asyncio
import json
import threading
import time
from typing import Literal

import pytest
from pydantic import BaseModel
from transformers.utils import get_json_schema

from shardwise.environments import ToolEnvironment
from shardwise.environments.tools import checked
from shardwise.types import Example


def add(a: int, b: int = 1) -> int:
    return a + b


async def slow_echo(text: str, seconds: float = 0.0) -> str:
    await asyncio.sleep(seconds)
    return text * 3


def nap(seconds: float) -> str:
    time.sleep(seconds)
    return "rested"


def active_threads() -> int:
    time.sleep(0.05)
    return threading.active_count()


def fails() -> None:
    raise RuntimeError("the tool is away")


class Order(BaseModel):
    count: int


def orders(count: str) -> int:
    return Order(count=count).count


async def orders_later(count: str) -> int:
    return orders(count)


class Mute(Exception):
    def __str__(self):
        raise ValueError("no words")


def mutters() -> None:
    raise Mute


async def cancels() -> None:
    raise asyncio.CancelledError


def interrupts() -> None:
    raise KeyboardInterrupt


class Quit(BaseException):
    pass


def quits() -> None:
    raise Quit("enough")


async def quits_later() -> None:
    raise Quit("enough")


async def generator_ends() -> None:
    raise GeneratorExit


async def withdraws() -> None:
    asyncio.current_task().cancel()
    await asyncio.sleep(60)


async def withdraws_at_its_end() -> str:
    asyncio.current_task().cancel()
    return "never read"


async def blocks() -> str:
    time.sleep(2.2)
    return "too late"


def environment(*more, **options):
    """With tools beside those of this file."""
    defaults = {
        "call_format": "hermes",
        "max_turns": 8,
        "tool_timeout_seconds": 5.0,
        "max_calls_per_turn": 16,
        "max_result_chars": 70,
    }
    more += (orders, orders_later, mutters, cancels, interrupts, blocks)
    more += (quits, quits_later, generator_ends, withdraws, withdraws_at_its_end)
    tools = {tool.__name__: checked(tool) for tool in (add, slow_echo, nap, fails, active_threads, *more)}
    return ToolEnvironment(tools, **(defaults | options))


def example(tools=None):
    return Example(uid="a", prompt_ids=[1], prompt="", data_source="", ground_truth="", tools=tools)


def call(name, **arguments):
    return f"<tool_call>{json.dumps({'name': name, 'arguments': arguments})}</tool_call>"


def answers(made, *calls):
    made.reset(example())
    return [message["content"] for message in asyncio.run(made.step("".join(calls)))]


def test_every_call_of_a_turn_is_answered_in_order_by_a_message():
    made = environment()
    made.reset(example())
    assert asyncio.run(made.step("so: " + call("slow_echo", text="ab") + call("add", a=2, b=3))) == [
        {"role": "tool", "name": "slow_echo", "content": "ababab"},
        {"role": "tool", "name": "add", "content": "5"},
    ]
    assert asyncio.run(made.step("it is 5")) is None
    assert made.reward() == {"score": 0.0, "tool_calls": 2, "tool_errors": 0}


@pytest.mark.alone
def test_calls_of_a_turn_run_at_the_same_time():
    began = time.perf_counter()
    answers(environment(), call("nap", seconds=0.4), call("nap", seconds=0.4), call("slow_echo", text="", seconds=0.4))
    assert time.perf_counter() - began < 0.9


def test_calls_beyond_the_limit_of_a_turn_are_not_made():
    made = environment(max_calls_per_turn=2)
    before = threading.active_count()
    *first, last = answers(made, *[call("active_threads")] * 300)[:3]
    assert all(int(count) <= before + 2 for count in first)
    assert last == "error: too many calls in one turn, at most 2"
    assert made.reward() == {"score": 0.0, "tool_calls": 300, "tool_errors": 298}


@pytest.mark.parametrize(
    ("asked", "answer"),
    [
        (call("ad", a=1), "error: there is no tool 'ad'; did you mean add?"),
        (call("xyz"), "error: there is no tool 'xyz'; the tools are active_threads, add, blocks, cancels, fails,"),
        (call("add", a="two"), "error: add: a: Input should be a valid integer"),
        (call("add"), "error: add: a: Missing required argument"),
        (call("add", a=1, c=1), "error: add: c: Unexpected keyword argument"),
        (call("fails"), "error: fails: RuntimeError: the tool is away"),
        (call("orders", count="x"), "error: orders: ValidationError: 1 validation error for Order\n"),
        (call("orders_later", count="x"), "error: orders_later: ValidationError: 1 validation error for Order\n"),
        (call("orders", count=5), "error: orders: count: Input should be a valid string"),
        (call("mutters"), "error: mutters: Mute: (its __str__ raised ValueError)"),
        (call("cancels"), "error: cancels: RuntimeError: the call was cancelled from inside"),
        (call("interrupts"), "error: interrupts: KeyboardInterrupt"),
        (call("quits"), "error: quits: Quit: enough"),
        (call("quits_later"), "error: quits_later: Quit: enough"),
        (call("generator_ends"), "error: generator_ends: GeneratorExit"),
        (call("withdraws"), "error: withdraws: CancelledError"),
        (call("withdraws_at_its_end"), "error: withdraws_at_its_end: CancelledError"),
        (call("blocks"), "error: blocks: TimeoutError: no answer within 2 s: it blocked the event loop; await"),
        ("<tool_call>{</tool_call>", "error: the tool call is not valid JSON"),
        (call("nap", seconds=9), "error: nap: TimeoutError: no answer within 2 s"),
        (call("slow_echo", text="", seconds=9), "error: slow_echo: TimeoutError: no answer within 2 s"),
    ],
)
def test_a_call_that_cannot_be_answered_tells_the_policy_why(asked, answer):
    made = environment(tool_timeout_seconds=2, max_result_chars=1000)
    first, second = answers(made, asked, call("add", a="1"))
    assert first.startswith(answer)
    assert second == "2"  # the others are answered; a number may be text, as some models write it
    assert made.reward() == {"score": 0.0, "tool_calls": 2, "tool_errors": 1}


def test_a_step_that_is_cancelled_cancels_its_calls_and_answers_none():
    ended = []

    async def waits() -> None:
        try:
            await asyncio.sleep(60)
        except asyncio.CancelledError:
            ended.append("waits")
            raise

    made = environment(waits)
    made.reset(example())

    async def cancelled():
        step = asyncio.create_task(made.step(call("waits") + call("withdraws")))
        await asyncio.sleep(0.1)
        step.cancel()
        await step

    with pytest.raises(asyncio.CancelledError):
        asyncio.run(cancelled())
    assert ended == ["waits"]
    assert made.reward()["tool_calls"] == 0


def test_long_results_are_cut():
    assert answers(environment(max_result_chars=5), call("slow_echo", text="abc")) == ["abcab..."]


def test_a_row_offers_some_tools_only():
    made = environment(max_result_chars=100)
    made.reset(example(["nap", "fails"]))
    (message,) = asyncio.run(made.step(call("add", a=1)))
    assert "the tools are fails, nap" in message["content"]
    made.reset(example([]))
    (message,) = asyncio.run(made.step(call("add", a=1)))
    assert message["content"] == "error: there are no tools"


def test_choices_of_a_schema_are_the_values_that_there_are():
    """transformers reads them from a docstring, which no type hint tells of."""

    def serves(drink: str | None = None, extras: list[str] = []) -> str:  # noqa: B006
        """Serves.

        Args:
            drink: What (choices: ["tea", "coffee"])
            extras: With what (choices: ["milk"])
        """
        return f"{drink} with {extras}"

    made = environment(serves, schemas=[get_json_schema(serves)])
    asked = [{"drink": "tea", "extras": ["milk"]}, {"drink": None}, {"drink": "wine"}, {"extras": ["milk", "honey"]}]
    assert answers(made, *[call("serves", **arguments) for arguments in asked]) == [
        "tea with ['milk']",
        "None with []",
        'error: serves: drink: Input should be one of ["tea", "coffee"]',
        'error: serves: extras: Input should be one of ["milk"]',
    ]


def test_values_of_a_literal_are_the_values_that_there_are():
    def serves(drink: Literal["tea", "coffee"], cups: Literal[1, 2] = 1) -> str:
        return f"{cups} {drink}"

    made = environment(serves)
    asked = [{"drink": "tea", "cups": 2}, {"drink": "wine"}, {"drink": "tea", "cups": 3}]
    assert answers(made, *[call("serves", **arguments) for arguments in asked]) == [
        "2 tea",
        "error: serves: drink: Input should be 'tea' or 'coffee'",
        "error: serves: cups: Input should be 1 or 2",
    ]


def test_calls_of_the_last_turn_are_not_made_and_end_the_episode_all_the_same():
    done = []

    def notes(text: str) -> None:
        done.append(text)

    made = environment(notes, max_turns=2)
    made.reset(example())
    asyncio.run(made.step(call("notes", text="first")))
    assert asyncio.run(made.step(call("notes", text="second"))) == [
        {
            "role": "tool",
            "name": "notes",
            "content": "error: this is the last turn, so nobody would read the answer",
        }
    ]
    assert done == ["first"]
    assert made.reward() == {"score": 0.0, "tool_calls": 2, "tool_errors": 1}


def test_a_last_turn_without_calls_is_the_answer():
    made = environment(max_turns=1)
    made.reset(example())
    assert asyncio.run(made.step("it is 5")) is None


def test_the_other_format_is_read_where_it_is_chosen():
    made = environment(call_format="qwen")
    text = "<tool_call><function=add><parameter=a>4</parameter></function></tool_call>"
    assert answers(made, text) == ["5"]
