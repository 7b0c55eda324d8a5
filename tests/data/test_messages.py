import pytest

from shardwise.config import DataError
from shardwise.data.messages import checked_messages, prompt_messages

USER = {"role": "user", "content": "2+3="}


@pytest.mark.parametrize(
    "call",
    [
        {"function": {"name": "add", "arguments": '{"a": 1}'}},  # as OpenAI writes them
        {"function": {"name": "add", "arguments": {"a": 1, "b": None}}, "id": None},  # as parquet fills them up
    ],
)
def test_arguments_come_in_several_forms(call):
    called = {"function": {"name": "add", "arguments": {"a": 1}}}
    assert checked_messages([USER, {"role": "assistant", "tool_calls": [call]}], "row") == [
        USER,
        {"role": "assistant", "content": "", "tool_calls": [called]},
    ]


@pytest.mark.parametrize(
    ("messages", "message"),
    [
        ("hello", 'the messages are a string, expected a list of {role, content}: "hello"'),
        ([], "the messages are an empty list, expected a list of {role, content}: []"),
        (["hello"], 'message 1 is a string, expected {role, content}: "hello"'),
        ([USER, {"content": "x"}], 'message 2 has no "role": {"content": "x"}'),
        ([USER, {"role": "assistant"}], 'message 2 has no "content": {"role": "assistant"}'),
        ([{"role": "user", "content": ["x"]}], '"content" of message 1 is a list, expected a string: ["x"]'),
        ([{"role": "user", "content": None}], '"content" of message 1 is null, expected a string: null'),
        ([USER, {"role": "assistant", "content": None, "tool_calls": []}], '"content" of message 2 is null'),
        ([USER, {"role": "assistant", "tool_calls": "add"}], "message 2 has tool_calls that are no list of objects"),
        (
            [USER, {"role": "assistant", "tool_calls": [{"function": {"name": "add", "arguments": "a=1"}}]}],
            'message 2 calls a tool with arguments that are no JSON object: "a=1"',
        ),
    ],
)
def test_bad_messages_are_refused_by_row(messages, message):
    with pytest.raises(DataError) as error:
        checked_messages(messages, "talk.jsonl line 3")
    assert str(error.value).startswith(f"talk.jsonl line 3: {message}")


def test_keys_that_parquet_has_filled_up_are_left_out():
    assert checked_messages([USER | {"name": None, "tool_calls": None}], "row") == [USER]


def test_a_prompt_has_one_system_message_its_own_or_the_given_one():
    given = {"role": "system", "content": "be kind"}
    own = {"role": "system", "content": "be brief"}
    assert prompt_messages("2+3=", "be kind", "row") == [given, USER]
    assert prompt_messages([own, USER], "be kind", "row") == [own, USER]
    assert prompt_messages([USER], None, "row") == [USER]
