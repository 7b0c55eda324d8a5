"""What a chat request may say, and what its refusals and answers look like to a client."""

import json

import pytest

from shardwise.environments.chat_format import (
    ApiError,
    ChatAnswer,
    completion_body,
    completion_events,
    plain_message,
    read_request,
    read_turn,
    says_the_same,
)

USER = {"role": "user", "content": "2+3="}


def request(**more):
    return {"model": "policy", "messages": [USER], **more}


def test_what_clients_send_unasked_is_taken():
    read = read_request(
        request(
            n=1,
            stream=False,
            frequency_penalty=0.0,
            presence_penalty=0,
            top_logprobs=None,
            seed=None,
            logit_bias=None,
            parallel_tool_calls=True,
            response_format={"type": "text"},
            user="me",
            metadata={"a": "b"},
            max_tokens=9,
            max_completion_tokens=5,
        )
    )
    assert read.token_limit == 5
    assert read_request(request()).token_limit is None


@pytest.mark.parametrize(
    ("more", "told", "param"),
    [
        ({"n": 2}, "n=2: Input should be 1", "n"),
        ({"seed": 7}, "seed is not offered here; leave it out. What a request may have: frequency", "seed"),
        ({"tool_choice": "required"}, "tool_choice=\"required\": Input should be 'auto' or 'none'", "tool_choice"),
        ({"response_format": {"type": "json_object"}}, "response_format", "response_format.type"),
        ({"frequency_penalty": 0.5}, "frequency_penalty=0.5", "frequency_penalty"),
        ({"max_tokens": 0}, "max_tokens=0: Input should be greater than 0", "max_tokens"),
        ({"max_tokens": True}, "max_tokens=true: Input should be a valid integer", "max_tokens"),
        ({"n": True}, "n=true: Input should be a number", "n"),
        ({"frequency_penalty": False}, "frequency_penalty=false: Input should be a number", "frequency_penalty"),
        ({"temperature": "1.0"}, 'temperature="1.0": Input should be a valid number', "temperature"),
        ({"messages": "hi"}, 'messages="hi": Input should be a valid list', "messages"),
    ],
)  # fmt: skip
def test_what_is_not_offered_is_refused_by_its_name(more, told, param):
    with pytest.raises(ApiError) as refused:
        read_request(request(**more))
    assert (refused.value.status, refused.value.param) == (400, param)
    assert told in str(refused.value)
    assert refused.value.body["error"]["type"] == "invalid_request_error"


@pytest.mark.parametrize(
    ("body", "told"),
    [
        (None, "the body is null; send a JSON object"),
        ([], "the body is []"),
        ({"messages": []}, "model: Field required"),
    ],
)
def test_another_body_is_refused(body, told):
    with pytest.raises(ApiError, match=told.replace("[", r"\[")):
        read_request(body)


def test_there_is_one_model():
    with pytest.raises(ApiError, match="there is no model 'gpt-4o'; the one here is 'policy'") as refused:
        read_request(request(model="gpt-4o"))
    assert (refused.value.status, refused.value.code) == (404, "model_not_found")


@pytest.mark.parametrize(
    ("message", "told"),
    [
        ({"role": "critic", "content": "no"}, "message 3 has the role 'critic'; use system, user, assistant, tool"),
        ({"content": "no"}, "message 3 has the role None"),
        ({"role": [], "content": "no"}, "message 3 has the role []; use system, user, assistant, tool"),
        ({"role": {}, "content": "no"}, "message 3 has the role {}; use system, user, assistant, tool"),
        ({"role": "assistant", "tool_calls": 5}, "message 3 has tool_calls=5, expected a list of calls"),
        ({"role": "user", "content": "a", "name": {"a": 1}}, 'message 3 has name={"a": 1}, expected a string'),
        ({"role": "tool", "content": "a", "tool_call_id": 7}, "message 3 has tool_call_id=7, expected a string"),
        (
            {"role": "user", "content": [{"type": "image_url", "text": "a", "image_url": {"url": "b"}}]},
            "message 3 has a content that is not text",
        ),
        ({"role": "user", "content": [{"type": "image_url", "text": "a"}]}, "images are not offered here"),
        ({"role": "user", "content": [{"text": "a"}]}, '{"type": "text", "text": ...}'),
        ({"role": "user", "content": [{"type": "image_url", "image_url": {}}]}, "message 3 has a content that is"),
        ({"role": "user", "content": 5}, "message 3 has a content that is not text: 5"),
        ({"role": "user", "content": "a", "mood": "good"}, "message 3 has the key 'mood'"),
        ({"role": "assistant", "content": "", "tool_calls": [{"id": "a"}]}, 'message 3 has the tool call {"id": "a"}'),
        (
            {"role": "assistant", "tool_calls": [{"id": "a", "function": {"name": "f", "arguments": "{"}}]},
            "message 3 has the tool call",
        ),
    ],
)  # fmt: skip
def test_a_message_that_cannot_be_read_is_named(message, told):
    with pytest.raises(ApiError) as refused:
        plain_message(message, 3)
    assert told in str(refused.value)
    assert (refused.value.status, refused.value.param) == (400, "messages[2]")


def test_messages_say_the_same_in_different_forms():
    text = {"role": "developer", "content": [{"type": "text", "text": "Be "}, {"type": "text", "text": "brief."}]}
    assert plain_message(text, 1) == {"role": "system", "content": "Be brief."}
    told = plain_message({"role": "assistant", "content": " 5\n", "refusal": None, "annotations": []}, 1)
    assert says_the_same(told, {"role": "assistant", "content": "5"})
    assert not says_the_same(told, {"role": "assistant", "content": "6"})
    assert not says_the_same(told, {"role": "user", "content": "5"})


@pytest.mark.parametrize(
    ("role", "content", "expected"),
    [
        ("assistant", "5", True),
        ("assistant", "5##", True),
        ("assistant", " 5\n#", True),
        ("assistant", "5###", False),
        ("assistant", "5#6", False),
        ("user", "5#", False),
    ],
)
def test_what_an_assistant_said_is_the_same_with_the_stop_string_behind_it(role, content, expected):
    one, other = {"role": role, "content": "5"}, {"role": role, "content": content}
    assert says_the_same(one, other, ["#", "##"]) is expected
    assert says_the_same(other, one, ["#", "##"]) is expected


@pytest.fixture
def answer():
    text = '<tool_call>{"name": "f", "arguments": {"x": 1}}</tool_call>'
    return ChatAnswer(
        id="chatcmpl-a",
        message=read_turn(text, 2, call_format="hermes"),
        finish_reason="tool_calls",
        num_prompt_tokens=11,
        decode_tokens=lambda: ["a", "é", "\N{REPLACEMENT CHARACTER}"],
        logprobs=[-0.5, -1.5, -2.5],
    )


def test_an_answer_says_what_was_sampled(answer):
    body = completion_body(answer, logprobs=True)
    (choice,) = body["choices"]
    assert choice["message"] == {
        "role": "assistant",
        "content": None,
        "tool_calls": [{"id": "call_2_0", "type": "function", "function": {"name": "f", "arguments": '{"x": 1}'}}],
    }
    assert choice["finish_reason"] == "tool_calls"
    assert [(t["token"], t["logprob"], t["bytes"]) for t in choice["logprobs"]["content"]] == [
        ("a", -0.5, [97]),
        ("é", -1.5, [195, 169]),
        ("\N{REPLACEMENT CHARACTER}", -2.5, None),
    ]
    assert body["usage"] == {"prompt_tokens": 11, "completion_tokens": 3, "total_tokens": 14}
    assert completion_body(answer, logprobs=False)["choices"][0]["logprobs"] is None


def test_a_stream_holds_the_same_answer(answer):
    first, end, usage = completion_events(answer, logprobs=False, usage=True)
    whole = completion_body(answer, logprobs=False)
    message = first["choices"][0]["delta"]
    assert [call.pop("index") for call in message["tool_calls"]] == [0]
    assert message == whole["choices"][0]["message"]
    assert end["choices"][0]["delta"] == {}
    assert end["choices"][0]["finish_reason"] == "tool_calls"
    assert (usage["choices"], usage["usage"]) == ([], whole["usage"])
    assert len(list(completion_events(answer, logprobs=False, usage=False))) == 2
    json.dumps([first, end, usage, whole])
