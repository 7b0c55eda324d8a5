import time

import pytest

from shardwise.environments.tool_calls import ToolCall, hermes_calls, qwen_calls


def test_hermes_calls_come_in_order_with_text_around_them():
    text = (
        "<think>two things</think><tool_call>\n"
        '{"name": "add", "arguments": {"numbers": [1, {"deep": "}"}]}}\n</tool_call>\n'
        '<tool_call>{"name": "now"}</tool_call> done'
    )
    assert hermes_calls(text) == [
        ToolCall(name="add", arguments={"numbers": [1, {"deep": "}"}]}),
        ToolCall(name="now", arguments={}),
    ]


def test_a_turn_that_ended_inside_its_last_call_made_it():
    assert hermes_calls('<tool_call>{"name": "now"}') == [ToolCall(name="now")]
    assert qwen_calls("<tool_call><function=now>") == [ToolCall(name="now")]


@pytest.mark.parametrize(
    "cut", ["<parameter=code>x = 1\ny", "<parameter=code", "<parameter=a>1</parameter><parameter=b>"]
)
def test_a_qwen_call_that_was_cut_inside_a_parameter_is_none_without_it(cut):
    """By the token limit: the tool would be blamed on the call for arguments that are missing."""
    (call,) = qwen_calls(f"<tool_call><function=run>{cut}")
    assert call == ToolCall(error="the call of run ends inside a parameter, without </parameter>")
    inner, cut_off = qwen_calls(
        "<tool_call><function=a><parameter=x>print('<parameter=')</parameter></function></tool_call>"
        f"<tool_call><function=run>{cut}"
    )
    assert inner == ToolCall(name="a", arguments={"x": "print('<parameter=')"})
    assert cut_off == call


@pytest.mark.parametrize("read", [hermes_calls, qwen_calls])
@pytest.mark.parametrize("text", ["", "the answer is 5", "<tools>none</tools>", "tool_call"])
def test_text_without_calls_has_none(read, text):
    assert read(text) == []


@pytest.mark.parametrize(
    ("block", "error"),
    [
        ('{"name": "add", "arguments": {"a": 1}', "not valid JSON"),
        ("", "not valid JSON"),
        ('["add"]', "not of the form"),
        ('{"name": 3, "arguments": {}}', "not of the form"),
        ('{"name": "add", "arguments": "a=1"}', "not of the form"),
        ('{"arguments": {}}', "not of the form"),
        ("7" * 5000, "not valid JSON: Exceeds the limit"),
        ("[" * 100_000, "not valid JSON: maximum recursion depth exceeded"),
    ],
)
def test_a_hermes_call_that_cannot_be_read_says_why(block, error):
    (call,) = hermes_calls(f"<tool_call>{block}</tool_call>")
    assert error in call.error


def test_qwen_calls_read_values_as_json_where_they_are():
    text = (
        "Let me see.\n<tool_call>\n<function=search>\n<parameter=query>\nthe 3 bears\n</parameter>\n"
        '<parameter=limit>\n5\n</parameter>\n<parameter=tags>\n["a"]\n</parameter>\n</function>\n</tool_call>'
        "<tool_call><function=a></function><function=b><parameter=code>x = 1\ny = 2</parameter></function></tool_call>"
    )
    assert qwen_calls(text) == [
        ToolCall(name="search", arguments={"query": "the 3 bears", "limit": 5, "tags": ["a"]}),
        ToolCall(name="a"),
        ToolCall(name="b", arguments={"code": "x = 1\ny = 2"}),
    ]
    (call,) = qwen_calls('<tool_call>{"name": "a"}</tool_call>')
    assert "<function=name>" in call.error


def test_qwen_values_of_parameters_that_are_strings_are_text():
    properties = {"text": {"type": "string"}, "note": {"type": "string", "nullable": True}, "n": {"type": "integer"}}
    tools = [{"type": "function", "function": {"name": "put", "parameters": {"properties": properties}}}]
    written = {"text": '{"a": 1}', "note": "5", "n": "5", "else": "5"}
    body = "".join(f"<parameter={key}>{value}</parameter>" for key, value in written.items())
    (call,) = qwen_calls(f"<tool_call><function=put>{body}</function></tool_call>", tools)
    assert call.arguments == {"text": '{"a": 1}', "note": "5", "n": 5, "else": 5}
    text = "<tool_call><function=put><parameter=text>null</parameter><parameter=note>null</parameter>"
    assert qwen_calls(text, tools)[0].arguments == {"text": "null", "note": None}
    assert qwen_calls(text, [{"function": {"name": "put", "parameters": {"properties": {"text": True}}}}, {}])


@pytest.mark.parametrize("value", ["7" * 5000, "[" * 100_000])
def test_a_qwen_value_beyond_what_python_reads_as_json_is_text(value):
    text = f"<tool_call><function=a><parameter=b>{value}</parameter></function></tool_call>"
    assert qwen_calls(text) == [ToolCall(name="a", arguments={"b": value})]


@pytest.mark.parametrize(
    ("schema", "is_null"),
    [
        ({"type": ["string", "null"]}, True),
        ({"anyOf": [{"type": "string"}, {"type": "null"}]}, True),
        ({"oneOf": [{"type": "string", "pattern": "x"}, {"type": ["string"]}]}, False),
        ({"anyOf": [{"type": "string", "nullable": True}]}, True),
    ],
)
def test_a_qwen_value_that_may_be_a_string_or_null_is_a_text_or_none(schema, is_null):
    """As pydantic and OpenAI's strict mode write what may be left out."""
    tools = [{"function": {"name": "put", "parameters": {"properties": {"code": schema}}}}]
    text = "<tool_call><function=put><parameter=code>{}</parameter></function></tool_call>"
    assert qwen_calls(text.format("02134"), tools)[0].arguments == {"code": "02134"}
    assert qwen_calls(text.format("true"), tools)[0].arguments == {"code": "true"}
    assert qwen_calls(text.format("null"), tools)[0].arguments == {"code": None if is_null else "null"}


@pytest.mark.parametrize(
    "schema", [{"type": ["string", "integer"]}, {"anyOf": [{"type": "string"}, {"$ref": "#"}]}, {}]
)
def test_a_qwen_value_that_may_be_something_else_is_read_as_json(schema):
    tools = [{"function": {"name": "put", "parameters": {"properties": {"code": schema}}}}]
    text = "<tool_call><function=put><parameter=code>12</parameter></function></tool_call>"
    assert qwen_calls(text, tools)[0].arguments == {"code": 12}


@pytest.mark.parametrize("number", ["NaN", "Infinity", "-Infinity", "1e999", "-1e999"])
def test_numbers_that_json_does_not_have_are_none(number):
    """A client could not read them where they are written again."""
    (call,) = hermes_calls(f'<tool_call>{{"name": "f", "arguments": {{"x": [{number}]}}}}</tool_call>')
    assert call.error == f"the tool call is not valid JSON: {number} is no number of JSON"
    (call,) = qwen_calls(f"<tool_call><function=f><parameter=x>{number}</parameter></function></tool_call>")
    assert call == ToolCall(name="f", arguments={"x": number})


@pytest.mark.parametrize("read", [hermes_calls, qwen_calls])
@pytest.mark.parametrize(
    "tag",
    [
        "<tool_call>",
        "<function=",
        "<function=a",
        "<function=a>",
        "<parameter=",
        "<parameter=a>\n",
        "<parameter=a>\n<",
        "\n",
    ],
)
@pytest.mark.parametrize("end", ["", "</parameter>", "</function></tool_call>"])
def test_a_policy_that_repeats_itself_is_read_in_time_that_grows_with_the_text(read, tag, end):
    text = "<tool_call><function=f>" + 20_000 * tag + end
    began = time.monotonic()
    read(text)
    assert time.monotonic() - began < 5, "minutes, where every tag looks through the whole text"
