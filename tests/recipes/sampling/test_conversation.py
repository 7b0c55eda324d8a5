"""Chat requests to tokens: what was sampled stays, what is new is rendered behind it, anything else is refused."""

import json
from dataclasses import replace

import pytest

from shardwise.data import longest_token, train_tokenizer
from shardwise.environments.chat_format import ApiError, completion_body, read_request
from shardwise.recipes.sampling.conversation import Conversation, Limits
from shardwise.rewards import Answer
from shardwise.types import Completion, Example, GenerateRequest

USER = {"role": "user", "content": "2+3="}
CALL = {"name": "add", "arguments": {"a": 2, "b": 3}}
TOOLS = [{"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}]


@pytest.fixture(scope="module")
def tokenizer():
    return train_tokenizer(["2+3=5"], vocab_size=261)


@pytest.fixture
def begin(tokenizer):
    def make(
        *,
        max_tokens=200,
        max_prompt_tokens=60,
        max_turns=4,
        call_format="hermes",
        media_token_ids=(),
        **sampling,
    ):
        request = GenerateRequest(
            uid="step 1/0/row/2",
            prompt_ids=[1],
            max_tokens=max_tokens,
            **{"temperature": 0.7, "stop": ["#"], "seed": 5} | sampling,
        )
        limits = Limits(max_prompt_tokens, max_turns, longest_token(tokenizer), media_token_ids)
        return Conversation(tokenizer, request, limits, call_format=call_format)

    return make


def chat(*messages, **more):
    return read_request({"model": "policy", "messages": list(messages), **more})


def turn(tokenizer, text, *, ends=True):
    """Sampled one byte at a time, as no encoder would write it."""
    token_ids = [tokenizer.encode(character, add_special_tokens=False)[0] for character in text]
    token_ids += [tokenizer.eos_token_id] * ends
    return Completion(
        token_ids=token_ids,
        logprobs=[-0.1 * place for place in range(len(token_ids))],
        finish_reason="stop" if ends else "length",
        policy_version=3,
    )


def say(conversation, tokenizer, text, *messages, ends=True, **more):
    """Asks and answers. Returns the assistant's message as a client reads it, and the request for its turn."""
    asked = conversation.ask(chat(*messages, **more))
    conversation.take(turn(tokenizer, text, ends=ends))
    return completion_body(asked.answer.result(), logprobs=False)["choices"][0]["message"], asked.request


def row(prompt_ids=(1, 2)):
    return Example(
        uid="row", prompt_ids=list(prompt_ids), prompt="?", data_source="", ground_truth="5", messages=[USER]
    )


def test_sampled_tokens_are_kept_and_messages_are_appended_by_hand(begin, tokenizer):
    conversation = begin()
    system = {"role": "system", "content": "Add."}
    first, asked_first = say(conversation, tokenizer, "56", system, USER)
    again = {"role": "user", "content": "no"}
    second, asked_second = say(conversation, tokenizer, "5", system, USER, first, again, max_tokens=7)
    prompt = tokenizer.encode("<|system|>Add.<|end|><|user|>2+3=<|end|><|assistant|>")
    observed = tokenizer.encode("<|user|>no<|end|><|assistant|>")
    six, five, end = *(tokenizer.encode(digit)[0] for digit in "65"), tokenizer.eos_token_id
    assert first == {"role": "assistant", "content": "56"}
    assert (asked_first.prompt_ids, asked_first.max_tokens, asked_first.uid) == (prompt, 200, "step 1/0/row/2/turn 0")
    assert (asked_second.prompt_ids, asked_second.max_tokens, asked_second.uid) == (
        [*prompt, five, six, end, *observed],
        7,
        "step 1/0/row/2/turn 1",
    )
    assert (asked_second.temperature, asked_second.stop, asked_second.seed) == (0.7, ["#"], 5)
    episode = conversation.episode(row(), Answer(score=1.0), version=0)
    completion = episode.completion
    assert completion.prompt_ids == prompt
    assert completion.token_ids == [five, six, end, *observed, five, end]
    assert completion.is_sampled == [True] * 3 + [False] * len(observed) + [True] * 2
    assert completion.logprobs == pytest.approx([0, -0.1, -0.2, *[0] * len(observed), 0, -0.1])
    assert (completion.num_turns, completion.finish_reason, completion.policy_version) == (2, "stop", 3)
    assert (episode.turns, episode.said) == (["56", "5"], [first, again, second])
    assert episode.ids_before_last_turn == [five, six, end, *observed]
    assert (episode.example.prompt_ids, episode.example.messages) == (prompt, [system, USER])
    assert episode.example.prompt == "<|system|>Add.<|end|><|user|>2+3=<|end|><|assistant|>"


def test_the_prompt_of_the_row_needs_no_other(begin, tokenizer):
    conversation = begin()
    _, asked = say(conversation, tokenizer, "5", USER)
    assert conversation.episode(row(asked.prompt_ids), Answer(), version=0).completion.prompt_ids is None


@pytest.mark.parametrize(
    ("call_format", "text"),
    [
        ("qwen", "<tool_call><function=f>\n<parameter=s>\n12\n</parameter>\n"),
        ("qwen", "<tool_call><function=f>"),
        ("hermes", '<tool_call>{"name": "f"}'),
    ],
)
def test_a_call_that_was_cut_is_text(begin, tokenizer, call_format, text):
    """Arguments may be missing, and a client that makes it would do something else than was meant."""
    first, _ = say(begin(call_format=call_format), tokenizer, text, USER, tools=TOOLS, ends=False)
    assert first == {"role": "assistant", "content": text}
    first, _ = say(begin(call_format=call_format), tokenizer, text, USER, tools=TOOLS)
    assert [call["function"]["name"] for call in first["tool_calls"]] == ["f"]


def test_a_turn_that_was_cut_is_ended_before_what_is_new(begin, tokenizer):
    conversation = begin()
    first, _ = say(conversation, tokenizer, "5", USER, ends=False, max_completion_tokens=1)
    _, asked = say(conversation, tokenizer, "5", USER, first, {"role": "user", "content": "go on"})
    assert tokenizer.decode(asked.prompt_ids).endswith("<|assistant|>5<|end|><|user|>go on<|end|><|assistant|>")


def test_calls_are_told_as_calls_and_recognized_however_they_are_written(begin, tokenizer):
    conversation = begin()
    text = f"Well. <tool_call>{json.dumps(CALL)}</tool_call>"
    first, _ = say(conversation, tokenizer, text, USER, tools=TOOLS)
    assert first["content"] == "Well."
    assert [(call["id"], call["type"], call["function"]["name"]) for call in first["tool_calls"]] == [
        ("call_0_0", "function", "add")
    ]
    assert json.loads(first["tool_calls"][0]["function"]["arguments"]) == CALL["arguments"]
    own = {"id": "call_0_0", "type": "function", "function": {"name": "add", "arguments": '{"b":3,  "a":2}'}}
    echoed = {"role": "assistant", "content": [{"type": "text", "text": "Well. "}], "tool_calls": [own]}
    result = {"role": "tool", "tool_call_id": "call_0_0", "content": "5"}
    _, asked = say(conversation, tokenizer, "5", USER, echoed | {"refusal": None}, result, tools=TOOLS)
    assert tokenizer.decode(asked.prompt_ids).endswith(f"{text}<|end|><|tool|>5<|end|><|assistant|>")
    assert conversation.episode(row(), Answer(), version=0).said[0] == {"role": "assistant", "content": text}


def test_calls_are_read_by_the_schemas_of_the_request(begin, tokenizer):
    put = {"name": "put", "parameters": {"properties": {"text": {"type": "string"}, "n": {"type": "integer"}}}}
    text = "<tool_call><function=put><parameter=text>5</parameter><parameter=n>5</parameter></function></tool_call>"
    tools = [{"type": "function", "function": put}]
    message, _ = say(begin(call_format="qwen"), tokenizer, text, USER, tools=tools)
    assert json.loads(message["tool_calls"][0]["function"]["arguments"]) == {"text": "5", "n": 5}


@pytest.mark.parametrize("echo", ["5", "5#", "5\n", " 5\n#"])
def test_a_stop_string_is_not_told_and_recognized_with_and_without_it(begin, tokenizer, echo):
    conversation = begin(stop=["?", "#"])
    asked = conversation.ask(chat(USER))
    sampled = turn(tokenizer, "5\n#!", ends=False)  # a token may bring more than the stop string
    conversation.take(replace(sampled, finish_reason="stop"))
    choice = completion_body(asked.answer.result(), logprobs=True)["choices"][0]
    assert choice["message"] == {"role": "assistant", "content": "5\n"}
    assert choice["finish_reason"] == "stop"
    assert [told["token"] for told in choice["logprobs"]["content"]] == ["5", "\n", "#", "!"]
    echoed = {"role": "assistant", "content": echo}
    _, again = say(conversation, tokenizer, "6", USER, echoed, USER)
    assert tokenizer.decode(again.prompt_ids).endswith("<|assistant|>5\n#!<|end|><|user|>2+3=<|end|><|assistant|>")
    say(conversation, tokenizer, "7", USER, choice["message"], USER, {"role": "assistant", "content": "6#"}, USER)
    episode = conversation.episode(row(), Answer(), version=0)
    assert episode.completion.token_ids[:4] == sampled.token_ids
    assert episode.turns == ["5\n#!", "6", "7"]


@pytest.mark.parametrize("echo", ["5#6", "5##", "#", "#5"])
def test_a_stop_string_lets_no_other_words_in(begin, tokenizer, echo):
    conversation = begin()
    say(conversation, tokenizer, "5#", USER, ends=False)
    with pytest.raises(ApiError, match="message 2 is not what was said before"):
        conversation.ask(chat(USER, {"role": "assistant", "content": echo}, USER))


def test_a_stop_string_of_the_users_is_what_the_user_said(begin, tokenizer):
    conversation = begin()
    first, _ = say(conversation, tokenizer, "5", {"role": "user", "content": "2+3=#"})
    with pytest.raises(ApiError, match="message 1 is not what was said before"):
        conversation.ask(chat(USER, first, USER))


def test_a_stop_string_may_end_a_call(begin, tokenizer):
    conversation = begin(stop=["</tool_call>"])
    message, _ = say(conversation, tokenizer, f"So: <tool_call>{json.dumps(CALL)}</tool_call>", USER, tools=TOOLS)
    assert (message["content"], len(message["tool_calls"])) == ("So:", 1)


@pytest.mark.parametrize(
    ("text", "more"),
    [
        ("<tool_call>{add</tool_call>", {"tools": TOOLS}),
        (f"<tool_call>{json.dumps(CALL)}</tool_call>", {}),
        (f"<tool_call>{json.dumps(CALL)}</tool_call>", {"tools": TOOLS, "tool_choice": "none"}),
    ],
)
def test_what_cannot_be_read_as_calls_or_should_not_is_text(begin, tokenizer, text, more):
    message, _ = say(begin(), tokenizer, text, USER, **more)
    assert message == {"role": "assistant", "content": text}


def test_a_request_that_is_repeated_is_told_the_same(begin, tokenizer):
    """Clients repeat what they had no answer to in time."""
    conversation = begin()
    asked = conversation.ask(chat(USER))
    assert conversation.ask(chat(USER)) is asked
    conversation.take(turn(tokenizer, "5"))
    assert conversation.ask(chat(USER)) is asked
    assert conversation.num_turns == 1


@pytest.mark.parametrize(
    ("messages", "more", "told"),
    [
        ([USER, {"role": "assistant", "content": "6"}, USER], {}, "message 2 is not what was said before"),
        ([{"role": "user", "content": "3+3="}], {}, 'message 1 is not what was said before in this episode: {"role"'),
        ([USER, {"role": "assistant", "content": "5"}], {}, "the 2 messages add nothing to the 2"),
        (
            [USER, {"role": "assistant", "content": "5"}, USER, {"role": "assistant", "content": "So"}],
            {},
            "a new message of the assistant's, which the policy did not say",
        ),
        ([USER, {"role": "assistant", "content": "5"}, USER], {"tools": TOOLS}, "the tools are not those of the first"),
    ],
)
def test_what_does_not_carry_the_conversation_on_is_refused_and_changes_nothing(begin, tokenizer, messages, more, told):
    conversation = begin()
    first, _ = say(conversation, tokenizer, "5", USER)
    before = conversation.completion
    with pytest.raises(ApiError) as refused:
        conversation.ask(chat(*messages, **more))
    assert (refused.value.status, told in str(refused.value)) == (400, True), refused.value
    assert conversation.completion is before
    say(conversation, tokenizer, "5", USER, first, USER)


def test_one_conversation_at_a_time(begin):
    conversation = begin()
    conversation.ask(chat(USER))
    with pytest.raises(ApiError, match="another request of this episode is being answered"):
        conversation.ask(chat({"role": "user", "content": "3+3="}))


@pytest.mark.parametrize(
    ("limits", "code", "told"),
    [
        ({"max_prompt_tokens": 6}, "context_length_exceeded", "the prompt has 7 tokens, the maximum context length"),
        ({"max_turns": 1}, "max_turns", "rollout.environment.max_turns=1"),
        ({"max_tokens": 9}, "context_length_exceeded", "rollout.max_response_tokens=9"),
    ],
)
def test_limits_refuse_a_further_turn_and_count_as_truncated(begin, tokenizer, limits, code, told):
    conversation = begin(**limits)
    messages = [USER]
    if "max_prompt_tokens" not in limits:
        messages += [say(conversation, tokenizer, "5", USER)[0], USER]
    with pytest.raises(ApiError) as refused:
        conversation.ask(chat(*messages))
    assert (refused.value.status, refused.value.code, told in str(refused.value)) == (400, code, True), refused.value
    assert conversation.refusal == str(refused.value)
    episode = conversation.episode(row(), Answer(), version=7)
    assert episode.completion.finish_reason == "length"
    assert episode.completion.num_turns == (0 if "max_prompt_tokens" in limits else 1)


@pytest.mark.parametrize(
    ("num_turns", "told"),
    [
        (0, "the prompt has 5000000 characters, more than the maximum context length of data.max_prompt_tokens=60"),
        (1, "no room for another turn: .* the new messages more characters than the others can hold"),
    ],
)
def test_f47_a_message_longer_than_its_tokens_could_be_is_refused_before_it_is_tokenized(
    begin, tokenizer, monkeypatch, num_turns, told
):
    conversation, flood = begin(), {"role": "user", "content": "7" * 5_000_000}
    before = [USER, say(conversation, tokenizer, "5", USER)[0]] if num_turns else []
    monkeypatch.setattr(tokenizer, "encode", None)
    with pytest.raises(ApiError, match=told) as refused:
        conversation.ask(chat(*before, flood))
    assert refused.value.code == "context_length_exceeded"


def test_without_a_turn_there_is_an_empty_completion_of_the_batchs_version(begin):
    episode = begin().episode(row(), Answer(failure="away"), version=7)
    completion = episode.completion
    assert (completion.token_ids, completion.is_sampled, completion.policy_version) == ([], [], 7)
    assert (episode.example, episode.last_turn, episode.outcome.failure) == (row(), "", "away")


def test_messages_that_the_template_refuses_are_a_refusal(begin, tokenizer):
    conversation = begin()
    with pytest.raises(ApiError, match="the prompt is empty") as refused:
        conversation.ask(chat({"role": "user", "content": " "}))
    assert refused.value.status == 400
    say(conversation, tokenizer, "5", USER)


def test_a_message_that_spells_an_image_is_a_refusal_and_changes_nothing(begin, tokenizer):
    """A part of an image without one would end the run of everybody where it is sampled."""
    media = tokenizer.convert_tokens_to_ids("<|system|>")
    conversation, spelled = begin(media_token_ids=[media]), {"role": "user", "content": "what is <|system|>?"}
    told = r"^the request: the text spells '<\|system\|>', by which the model knows a part of an image"
    with pytest.raises(ApiError, match=told) as refused:
        conversation.ask(chat(spelled))
    assert (refused.value.status, refused.value.param) == (400, "messages")
    first, _ = say(conversation, tokenizer, "5", USER)
    with pytest.raises(ApiError, match=told):
        conversation.ask(chat(USER, first, spelled))
    say(conversation, tokenizer, "6", USER, first, USER)
    assert (conversation.num_turns, conversation.refusal) == (2, None)


def test_half_a_surrogate_pair_is_no_character(begin, tokenizer):
    _, asked = say(begin(), tokenizer, "5", {"role": "user", "content": "\ud83d"})
    assert tokenizer.decode(asked.prompt_ids) == "<|user|>?<|end|><|assistant|>"


def test_a_request_may_say_how_the_run_samples(begin):
    begin(top_p=0.9).ask(chat(USER, top_p=0.9, temperature=0.7, stop="#"))


def test_greedy_episodes_take_requests_that_say_so(begin):
    begin(temperature=0.0).ask(chat(USER, temperature=0))
    with pytest.raises(ApiError, match=r"temperature=1\.0, but this completion is sampled with temperature=0\.0"):
        begin(temperature=0.0).ask(chat(USER, temperature=1))
