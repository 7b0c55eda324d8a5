import json
import re

import pytest
from hub_templates import LLAVA_1_5, LLAVA_1_6_MISTRAL
from tokenizers import Tokenizer
from tokenizers.decoders import Metaspace as MetaspaceDecoder
from tokenizers.models import Unigram
from tokenizers.pre_tokenizers import Metaspace
from tokenizers.processors import TemplateProcessing
from transformers import PreTrainedTokenizerFast

from shardwise.config import DataError
from shardwise.data.chat import (
    render_conversation,
    render_observation,
    render_prompt,
    render_response_sample,
    turn_end_id,
)
from shardwise.data.synthetic import train_tokenizer

CHATML = (
    "{% for m in messages %}{{ '<|' + m.role + '|>\\n' + m.content + '<|end|>\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>\\n' }}{% endif %}"
)
WITHOUT_END = (
    "{% for m in messages %}{{ m.role + ': ' + m.content + '\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ 'assistant: ' }}{% endif %}"
)
FORGETS_THINKING = (  # as reasoning models do: only the last turn keeps what was thought
    "{% for m in messages %}{{ '<|' + m.role + '|>' + "
    "(m.content if loop.last else m.content.split('</think>')[-1]) + '<|end|>' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)
WITH_TOOLS = (  # as Hermes and Qwen have it
    "{% if tools %}{{ '<tools>' }}{% for t in tools %}{{ t | tojson }}{% endfor %}{{ '</tools>' }}{% endif %}"
    "{% for m in messages %}{{ '<|' + m.role + '|>' + m.content }}{% for c in m.tool_calls or [] %}"
    "{{ '<tool_call>' + ({'name': c.function.name, 'arguments': c.function.arguments} | tojson) + '</tool_call>' }}"
    "{% endfor %}{{ '<|end|>' }}{% endfor %}{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)
ADD = {
    "type": "function",
    "function": {"name": "add", "parameters": {"type": "object", "properties": {"a": {"type": "integer"}}}},
}
CALLED = {"type": "function", "function": {"name": "add", "arguments": {"a": 1}}}
TALK = [
    {"role": "system", "content": "be brief"},
    {"role": "user", "content": "2+3="},
    {"role": "assistant", "content": "5"},
    {"role": "user", "content": "and 4+4?"},
    {"role": "assistant", "content": "it is 8"},
]


def conversation(*turns):
    return [{"role": role, "content": content} for role, content in turns]


def spans(tokenizer, token_ids, loss_mask):
    """The sequence as (trained, text) runs, decoded token by token."""
    assert len(token_ids) == len(loss_mask)
    runs = []
    for token_id, trained in zip(token_ids, loss_mask, strict=True):
        if not runs or runs[-1][0] != trained:
            runs.append((trained, []))
        runs[-1][1].append(token_id)
    return [(trained, tokenizer.decode(ids)) for trained, ids in runs]


def prompt_text(tokenizer, prompt, *, apply_chat_template=True, system_prompt=None):
    return tokenizer.decode(
        render_prompt(
            tokenizer, prompt, apply_chat_template=apply_chat_template, system_prompt=system_prompt, origin="row"
        )
    )


def test_loss_is_on_assistant_turns_and_their_end_token_but_not_on_the_newline_after_it(tokenizer):
    tokenizer.chat_template = CHATML
    token_ids, loss_mask = render_conversation(tokenizer, TALK, "row")
    assert token_ids == tokenizer.apply_chat_template(TALK, return_dict=False)
    assert spans(tokenizer, token_ids, loss_mask) == [
        (False, "<|system|>\nbe brief<|end|>\n<|user|>\n2+3=<|end|>\n<|assistant|>\n"),
        (True, "5<|end|>"),
        (False, "\n<|user|>\nand 4+4?<|end|>\n<|assistant|>\n"),
        (True, "it is 8<|end|>"),
        (False, "\n"),
    ]


def test_where_the_template_ends_no_turn_the_last_is_ended_by_the_token_that_ends_texts(tokenizer):
    tokenizer.chat_template = WITHOUT_END
    assert spans(tokenizer, *render_conversation(tokenizer, TALK[1:], "row")) == [
        (False, "user: 2+3=\nassistant: "),
        (True, "5\n"),
        (False, "user: and 4+4?\nassistant: "),
        (True, "it is 8\n<|end|>"),
    ]


@pytest.fixture
def glm_tokenizer(tokenizer):
    """As GLM 4's: what follows a turn ends it, and texts end with a token that no template writes."""
    roles = ["<|system|>", "<|user|>", "<|assistant|>", "<|observation|>"]
    tokenizer.add_special_tokens({"additional_special_tokens": roles, "eos_token": "<|endoftext|>", "bos_token": "<s>"})
    tokenizer.chat_template = (
        "<s>{% for m in messages %}{{ '<|' + ('observation' if m.role == 'tool' else m.role) + '|>\\n' + m.content }}"
        "{% for c in m.tool_calls or [] %}{{ c.function.name }}{% endfor %}{% endfor %}"
        "{% if add_generation_prompt %}{{ '<|assistant|>\\n' }}{% endif %}"
    )
    return tokenizer


def test_trap_08_a_turn_that_the_next_message_ends_is_trained_to_end_there(glm_tokenizer):
    called = [{"role": "assistant", "content": "", "tool_calls": [CALLED]}, {"role": "tool", "content": "5"}]
    rendered = render_conversation(glm_tokenizer, [*TALK[:2], *called, *TALK[2:]], "row")
    assert spans(glm_tokenizer, *rendered) == [
        (False, "<s><|system|>\nbe brief<|user|>\n2+3=<|assistant|>\n"),
        (True, "add<|observation|>"),
        (False, "\n5<|assistant|>\n"),
        (True, "5<|user|>"),
        (False, "\nand 4+4?<|assistant|>\n"),
        (True, "it is 8<|user|>"),
    ]
    assert turn_end_id(glm_tokenizer) == glm_tokenizer.convert_tokens_to_ids("<|user|>")


@pytest.mark.parametrize("template", [CHATML, WITH_TOOLS])
def test_a_conversation_of_many_turns_is_tokenized_a_few_times_and_not_once_a_turn(tokenizer, monkeypatch, template):
    tokenizer.add_special_tokens({"additional_special_tokens": ["<|user|>", "<|assistant|>"]})
    tokenizer.chat_template = template
    talk = conversation(
        *(turn for n in range(40) for turn in (("user", f"{n} + {n}? "), ("assistant", f" is {2 * n}")))
    )
    whole = tokenizer.apply_chat_template(talk, tokenize=False)
    expected, encode, num_chars = tokenizer.encode(whole, add_special_tokens=False), tokenizer.encode, []

    def counted(text, **options):
        num_chars.append(len(text))
        return encode(text, **options)

    monkeypatch.setattr(tokenizer, "encode", counted)
    token_ids, loss_mask = render_conversation(tokenizer, talk, "row")
    assert token_ids == expected
    assert sum(loss_mask) > 80
    assert sum(num_chars) < 8 * len(whole)


def test_a_turn_is_not_ended_by_the_token_that_begins_texts(glm_tokenizer):
    glm_tokenizer.chat_template = "{% for m in messages %}{{ '<s>' + m.content }}{% endfor %}{{ '' }}"
    rendered = render_conversation(glm_tokenizer, TALK[1:], "row")
    assert spans(glm_tokenizer, *rendered)[-2:] == [(False, "<s>and 4+4?"), (True, "<s>it is 8<|endoftext|>")]
    assert turn_end_id(glm_tokenizer) == glm_tokenizer.eos_token_id


def test_answers_in_a_row_with_nothing_between_them_are_one(tokenizer):
    tokenizer.chat_template = "{% for m in messages %}{{ m.content }}{% endfor %}"
    rendered = render_conversation(tokenizer, [*TALK[1:3], TALK[4]], "row")
    assert spans(tokenizer, *rendered) == [(False, "2+3="), (True, "5it is 8<|end|>")]


def test_a_turn_with_a_weight_of_0_is_context(tokenizer):
    def trained(*weights):
        answers = [TALK[2] | {"weight": weights[0]}, TALK[4] | {"weight": weights[1]}]
        return spans(tokenizer, *render_conversation(tokenizer, [*TALK[:2], answers[0], TALK[3], answers[1]], "row"))

    whole = spans(tokenizer, *render_conversation(tokenizer, TALK, "row"))
    assert trained(1, None) == whole
    assert [text for is_trained, text in trained(0, 1) if is_trained] == [whole[-1][1]] != []
    assert "".join(text for _, text in trained(0, 1)) == "".join(text for _, text in whole)
    assert trained(1.0, 0) == whole[:2]
    with pytest.raises(
        DataError, match=r"^row: the conversation has no assistant turn with a weight, so there is noth"
    ):
        trained(0, 0)
    with pytest.raises(
        DataError, match=r"^row: an assistant turn has the weight 0\.5; 0 leaves it untrained, 1 trains"
    ):
        trained(0.5, 1)


def test_turns_after_the_last_assistant_turn_are_left_out(tokenizer):
    extra = [*TALK, {"role": "user", "content": "thanks"}]
    assert render_conversation(tokenizer, extra, "row") == render_conversation(tokenizer, TALK, "row")


def test_empty_answer_trains_its_end_token(tokenizer):
    talk = conversation(("user", "say nothing"), ("assistant", ""))
    assert spans(tokenizer, *render_conversation(tokenizer, talk, "row")) == [
        (False, "<|user|>say nothing<|end|><|assistant|>"),
        (True, "<|end|>"),
    ]


def test_token_that_merges_over_the_generation_prompt_keeps_the_prompt_of_inference():
    tokenizer = train_tokenizer(["\n\n"] * 20, vocab_size=262)
    tokenizer.chat_template = CHATML
    assert len(tokenizer.encode("\n\n")) == 1
    talk = conversation(("user", "hi"), ("assistant", "\n"))
    token_ids, loss_mask = render_conversation(tokenizer, talk, "row")
    prompt = render_prompt(tokenizer, talk[:1], apply_chat_template=True, system_prompt=None, origin="row")
    assert token_ids[: len(prompt)] == prompt
    assert spans(tokenizer, token_ids, loss_mask) == [
        (False, "<|user|>\nhi<|end|>\n<|assistant|>\n"),
        (True, "\n<|end|>"),
        (False, "\n"),
    ]


@pytest.mark.parametrize(
    ("template", "expected"),
    [
        (LLAVA_1_5, ["be brief USER: 2+3= ASSISTANT:", " 5 ", "USER: and 4+4? ASSISTANT:", " it is 8 "]),
        (
            LLAVA_1_6_MISTRAL,
            [
                "<<SYS>>\nbe brief\n<</SYS>>\n\n[INST] 2+3= [/INST]",
                " 5</s> ",
                "[INST] and 4+4? [/INST]",
                " it is 8</s> ",
            ],
        ),
    ],
    ids=["llava-1.5", "llava-1.6"],
)
def test_a_template_that_takes_words_as_parts_is_given_parts(tokenizer, template, expected):
    """LLaVA's: the first writes nothing of a string, the other refuses it."""
    tokenizer.chat_template = template
    as_parts = [turn | {"content": [{"type": "text", "text": turn["content"]}]} for turn in TALK]
    token_ids, loss_mask = render_conversation(tokenizer, TALK, "row")
    assert token_ids == [*tokenizer.apply_chat_template(as_parts, return_dict=False), tokenizer.eos_token_id]
    expected_spans = [(index % 2 == 1, text) for index, text in enumerate(expected)]
    assert spans(tokenizer, token_ids[:-1], loss_mask[:-1]) == expected_spans
    assert loss_mask[-1]
    assert prompt_text(tokenizer, TALK[:2]) == expected[0]
    assert observed(tokenizer, "and 4+4?", last="5").endswith(expected[2])


IN_PARTS = [
    turn | {"content": [{"type": "text", "text": words} for words in turn["content"].partition(" ") if words]}
    for turn in TALK
]
TAKES_PARTS = (  # writes a mark behind each
    "{% for m in messages %}{{ '<|' + m.role + '|>' }}{% if m.content is string %}{{ m.content }}{% else %}"
    "{% for part in m.content %}{{ part.text + '/' }}{% endfor %}{% endif %}{{ '<|end|>' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)
PARTS_OF_USERS = TAKES_PARTS.replace("m.content is string", "m.role != 'user' or m.content is string")


def test_parts_are_parts_to_a_template_that_writes_them_one_by_one(tokenizer):
    """Token for token what transformers makes of the same messages."""
    tokenizer.chat_template = TAKES_PARTS
    token_ids, loss_mask = render_conversation(tokenizer, IN_PARTS, "row")
    assert token_ids == tokenizer.apply_chat_template(IN_PARTS, return_dict=False)
    assert [text for trained, text in spans(tokenizer, token_ids, loss_mask) if trained] == [
        "5/<|end|>",
        "it/ /is 8/<|end|>",
    ]
    expected = tokenizer.apply_chat_template(IN_PARTS[:4], tokenize=False, add_generation_prompt=True)
    assert prompt_text(tokenizer, IN_PARTS[:4]) == expected


@pytest.mark.parametrize("template", [None, CHATML, WITHOUT_END])
def test_parts_are_joined_for_a_template_that_takes_strings_alone(tokenizer, template):
    tokenizer.chat_template = template or tokenizer.chat_template
    assert render_conversation(tokenizer, IN_PARTS, "row") == render_conversation(tokenizer, TALK, "row")
    tokenizer.chat_template = PARTS_OF_USERS
    mixed = [part if part["role"] == "user" else turn for part, turn in zip(IN_PARTS, TALK, strict=True)]
    token_ids, _ = render_conversation(tokenizer, IN_PARTS, "row")
    assert token_ids == tokenizer.apply_chat_template(mixed, return_dict=False)


def test_parts_that_say_nothing_are_an_empty_prompt(tokenizer):
    empty = [{"role": "user", "content": [{"type": "text", "text": " "}]}]
    with pytest.raises(DataError, match="row: the prompt is empty"):
        prompt_text(tokenizer, empty)


LAST_IF_ASKED = "{% if loop.index0 % 2 or not loop.last or add_generation_prompt %}[{{ m.content }}]{% endif %}"
BEHIND_A_SYSTEM = "{% if loop.first %}{{ 'S:' + m.content }}{% else %}[{{ m.content }}]{% endif %}"
SPREAD = "{{ m.role + ': ' + (m.content | list | join(' ')) + ';' }}"
COUNTED = "{% if loop.index0 % 2 == 0 and (loop.nextitem is defined or add_generation_prompt) %}<{{ m.content }}>"
COUNTED += "{% elif loop.index0 % 2 %}{{ m.content }}{% endif %}"


@pytest.mark.parametrize("turn", [LAST_IF_ASKED, BEHIND_A_SYSTEM, SPREAD, COUNTED])
def test_a_template_that_is_odd_in_other_ways_is_given_strings(tokenizer, turn):
    tokenizer.chat_template = "{% for m in messages %}" + turn + "{% endfor %}"
    token_ids, loss_mask = render_conversation(tokenizer, TALK[1:3], "row")
    assert token_ids == [*tokenizer.apply_chat_template(TALK[1:3], return_dict=False), tokenizer.eos_token_id]
    assert "type" not in tokenizer.decode(token_ids)
    assert any(loss_mask)


@pytest.mark.parametrize("parts", ["{{ '' }}", "{{ raise_exception('no parts') if m.content is not string }}"])
def test_a_template_that_writes_words_in_no_form_is_refused(tokenizer, parts):
    tokenizer.chat_template = "{% for m in messages %}{{ m.role + ': ' }}" + parts + "{% endfor %}"
    with pytest.raises(DataError, match=r"^row: .* writes no word of a user's message, .*model\.chat_template=FILE$"):
        render_conversation(tokenizer, TALK[1:], "row")


def observed(tokenizer, observation, *, last, apply_chat_template=True):
    (last_token_id,) = tokenizer.encode(last)
    return tokenizer.decode(
        render_observation(
            tokenizer,
            observation,
            apply_chat_template=apply_chat_template,
            last_token_id=last_token_id,
            origin="row",
            max_chars=100,
        )
    )


@pytest.mark.parametrize("template", [CHATML, None], ids=["newline after turns", "plain"])
def test_sampled_turns_and_observations_are_the_tokens_of_the_whole_conversation(tokenizer, template):
    tokenizer.chat_template = template or tokenizer.chat_template
    token_ids = render_prompt(tokenizer, TALK[:2], apply_chat_template=True, system_prompt=None, origin="row")
    for turn, answer in (("5", TALK[3:4]), ("it is 8", "and 1+1?"), ("2", None)):
        token_ids += [*tokenizer.encode(turn), tokenizer.eos_token_id]  # as the policy samples it
        if answer is not None:
            token_ids += render_observation(
                tokenizer, answer, apply_chat_template=True, last_token_id=token_ids[-1], origin="row", max_chars=100
            )
    talk = [*TALK, *conversation(("user", "and 1+1?"), ("assistant", "2"))]
    whole, _ = render_conversation(tokenizer, talk, "row")
    assert token_ids == (whole[:-1] if template else whole)  # nothing is sampled after the last end token


def test_an_observation_brings_what_the_policy_did_not_sample_of_its_turns_end(tokenizer):
    tokenizer.chat_template = CHATML
    assert observed(tokenizer, "no", last="<|end|>") == "\n<|user|>\nno<|end|>\n<|assistant|>\n"
    assert observed(tokenizer, "no", last="7") == "<|end|>\n<|user|>\nno<|end|>\n<|assistant|>\n"
    tokenizer.chat_template = WITHOUT_END
    assert observed(tokenizer, "no", last="<|end|>") == "\nuser: no\nassistant: "
    assert observed(tokenizer, "<|end|>?", last="<|end|>") == "\nuser: <|end|>?\nassistant: "


def test_an_observation_fits_templates_that_rewrite_earlier_turns(tokenizer):
    tokenizer.chat_template = FORGETS_THINKING
    assert observed(tokenizer, "no", last="<|end|>") == "<|user|>no<|end|><|assistant|>"


def test_half_a_character_in_an_observation_is_replaced(tokenizer):
    tokenizer.chat_template = CHATML
    assert observed(tokenizer, "a\ud83db", last="<|end|>") == "\n<|user|>\na?b<|end|>\n<|assistant|>\n"
    assert observed(tokenizer, "a\ud83db", last="<|end|>", apply_chat_template=False) == "a?b"


@pytest.mark.parametrize("apply_chat_template", [True, False])
def test_a_text_that_spells_a_token_of_images_or_videos_is_refused_where_there_are_none(tokenizer, apply_chat_template):
    tokenizer.add_special_tokens({"additional_special_tokens": ["<|image|>", "<|video|>"]})
    media = {"media_token_ids": tokenizer.convert_tokens_to_ids(["<|image|>", "<|video|>"]), "origin": "row"}
    for token in ("<|image|>", "<|video|>"):
        reason = rf"^row: the text spells '{re.escape(token)}', by which the model knows a part of an image or a video"
        with pytest.raises(DataError, match=reason):
            render_observation(
                tokenizer,
                f"no {token}",
                apply_chat_template=apply_chat_template,
                last_token_id=1,
                max_chars=100,
                **media,
            )
        with pytest.raises(DataError, match=reason):
            render_prompt(tokenizer, f"{token}?", apply_chat_template=apply_chat_template, system_prompt=None, **media)
        for prompt, response in ((f"{token}?", "no"), ("what?", token)):
            with pytest.raises(DataError, match=reason):
                render_response_sample(
                    tokenizer,
                    prompt,
                    response,
                    apply_chat_template=apply_chat_template,
                    system_prompt=None,
                    **media,
                )
    words = render_prompt(tokenizer, "<|image?", apply_chat_template=False, system_prompt=None, **media)
    assert tokenizer.decode(words) == "<|image?"


def test_a_template_that_drops_what_was_said_is_refused(tokenizer):
    tokenizer.chat_template = "{% for m in messages %}{{ m.content | upper }}{% endfor %}"
    with pytest.raises(DataError, match=r"^row: the chat template does not write what an assistant says as it is"):
        observed(tokenizer, "no", last="<|end|>")


def test_an_observation_without_template_is_its_own_tokens(tokenizer):
    tokenizer.chat_template = None
    assert observed(tokenizer, " no: ", last="<|end|>", apply_chat_template=False) == " no: "
    with pytest.raises(DataError, match=r"^row: the observation is a list, but data\.apply_chat_template=false"):
        observed(tokenizer, TALK[:1], last="<|end|>", apply_chat_template=False)
    tokenizer.chat_template = CHATML
    with pytest.raises(DataError, match=r'^row: message 1 has no "content"'):
        observed(tokenizer, [{"role": "tool"}], last="<|end|>")


def test_template_that_rewrites_earlier_turns_is_refused_with_an_example(tokenizer):  # trap 31
    tokenizer.chat_template = FORGETS_THINKING
    talk = conversation(("user", "q"), ("assistant", "<think>hm</think>a"), ("user", "r"), ("assistant", "b"))
    with pytest.raises(DataError) as error:
        render_conversation(tokenizer, talk, "talk.jsonl line 3")
    message = str(error.value)
    assert message.startswith("talk.jsonl line 3: the chat template is not prefix-stable: it wrote '")
    assert "<|assistant|><think>hm</think>a<|end|>', and" in message
    assert "<|assistant|>a<|end|><|user|>r<|end|>" in message
    assert "set model.chat_template=FILE" in message


def test_template_that_rewrites_earlier_turns_serves_single_turns_and_context(tokenizer):
    tokenizer.chat_template = FORGETS_THINKING
    single = conversation(("user", "q"), ("assistant", "<think>hm</think>a"))
    assert spans(tokenizer, *render_conversation(tokenizer, single, "row"))[-1] == (True, "<think>hm</think>a<|end|>")
    sample = render_response_sample(
        tokenizer,
        [*single, *conversation(("user", "r"))],
        "b",
        apply_chat_template=True,
        system_prompt=None,
        origin="row",
    )
    assert spans(tokenizer, *sample) == [
        (False, "<|user|>q<|end|><|assistant|>a<|end|><|user|>r<|end|><|assistant|>"),
        (True, "b<|end|>"),
    ]


CALLS = [
    {"role": "user", "content": "1+1="},
    {"role": "assistant", "content": None, "tool_calls": [CALLED]},
    {"role": "tool", "content": "2"},
    {"role": "assistant", "content": "2", "tool_calls": None},
]


def test_tools_are_in_the_prompt_as_in_reinforcement_learning_and_calls_are_trained(tokenizer):
    tokenizer.chat_template = WITH_TOOLS
    token_ids, loss_mask = render_conversation(tokenizer, CALLS, "row", tools=[ADD])
    prompt = render_prompt(
        tokenizer, CALLS[:1], apply_chat_template=True, system_prompt=None, origin="row", tools=[ADD]
    )
    assert token_ids[: len(prompt)] == prompt
    assert tokenizer.decode(prompt) == f"<tools>{json.dumps(ADD)}</tools><|user|>1+1=<|end|><|assistant|>"
    assert spans(tokenizer, token_ids[len(prompt) :], loss_mask[len(prompt) :]) == [
        (True, '<tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call><|end|>'),
        (False, "<|tool|>2<|end|><|assistant|>"),
        (True, "2<|end|>"),
    ]
    assert not any(loss_mask[: len(prompt)])


def test_an_empty_list_of_tool_calls_is_none(tokenizer):
    plain = render_conversation(tokenizer, TALK[1:3], "row")
    empty = [TALK[1], {**TALK[2], "tool_calls": []}]
    assert render_conversation(tokenizer, empty, "row") == plain


def test_a_template_that_leaves_tool_calls_out_is_refused(tokenizer):
    with pytest.raises(DataError, match=r"^row: the chat template does not write the tool calls of an assistant turn"):
        render_conversation(tokenizer, CALLS, "row")


def test_response_sample_with_template_equals_the_conversation(tokenizer):
    sample = render_response_sample(
        tokenizer, "2+3=", "5", apply_chat_template=True, system_prompt="be brief", origin="row"
    )
    assert sample == render_conversation(tokenizer, TALK[:3], "row")


def test_response_sample_without_template_trains_response_and_end_token(tokenizer):
    token_ids, loss_mask = render_response_sample(
        tokenizer, "2+3=", "5", apply_chat_template=False, system_prompt=None, origin="row"
    )
    assert tokenizer.convert_ids_to_tokens(token_ids) == ["2", "+", "3", "=", "5", "<|end|>"]
    assert loss_mask == [False, False, False, False, True, True]


def test_begin_token_comes_once_before_the_prompt_and_never_before_the_response(tokenizer):
    from tokenizers.processors import TemplateProcessing

    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(
        single="<|system|> $A", special_tokens=[("<|system|>", tokenizer.convert_tokens_to_ids("<|system|>"))]
    )
    token_ids, _ = render_response_sample(
        tokenizer, "2+3=", "5", apply_chat_template=False, system_prompt=None, origin="row"
    )
    assert tokenizer.decode(token_ids) == "<|system|>2+3=5<|end|>"
    assert prompt_text(tokenizer, "2+3=") == "<|user|>2+3=<|end|><|assistant|>"  # a template writes its own


def test_prompts_end_where_the_answer_begins(tokenizer):
    assert prompt_text(tokenizer, "2+3=") == "<|user|>2+3=<|end|><|assistant|>"
    assert prompt_text(tokenizer, "2+3=", apply_chat_template=False) == "2+3="
    messages = [{"role": "user", "content": "2+3=", "name": None}]  # parquet fills absent keys with null
    assert prompt_text(tokenizer, messages) == "<|user|>2+3=<|end|><|assistant|>"


def test_system_prompt_goes_before_prompts_that_have_none(tokenizer):
    assert prompt_text(tokenizer, "hi", system_prompt="be kind") == (
        "<|system|>be kind<|end|><|user|>hi<|end|><|assistant|>"
    )
    assert prompt_text(tokenizer, TALK[:2], system_prompt="be kind") == (
        "<|system|>be brief<|end|><|user|>2+3=<|end|><|assistant|>"
    )


@pytest.mark.parametrize("apply_chat_template", [True, False])
@pytest.mark.parametrize("prompt", ["", " \n"])
def test_empty_prompt_is_refused(tokenizer, prompt, apply_chat_template):
    with pytest.raises(DataError, match=r"^row: the prompt is empty; fill it in or remove it"):
        prompt_text(tokenizer, prompt, apply_chat_template=apply_chat_template)


def test_prompt_of_zero_tokens_is_refused(tokenizer):
    from tokenizers.normalizers import Replace

    tokenizer.backend_tokenizer.normalizer = Replace("?", "")
    with pytest.raises(DataError, match=r"^row: the prompt has no tokens"):
        prompt_text(tokenizer, "???", apply_chat_template=False)


def test_messages_without_a_template_are_refused(tokenizer):
    with pytest.raises(
        DataError, match=r"^row: the prompt is a list, but data\.apply_chat_template=false takes strings"
    ):
        prompt_text(tokenizer, TALK[:2], apply_chat_template=False)


def test_tokenizer_without_chat_template_is_refused_with_both_ways_out(tokenizer):  # trap 31
    tokenizer.chat_template = None
    with pytest.raises(DataError, match=r"set data\.apply_chat_template=false .* or model\.chat_template=FILE"):
        prompt_text(tokenizer, "hi")
    assert prompt_text(tokenizer, "hi", apply_chat_template=False) == "hi"


def test_template_that_refuses_the_messages_names_the_row(tokenizer):
    tokenizer.chat_template = "{{ raise_exception('roles must alternate') }}"
    with pytest.raises(DataError, match=r"^row: the chat template refuses the messages \(roles must alternate\): \[\{"):
        prompt_text(tokenizer, "hi")


def test_values_that_a_template_cannot_write_name_the_row(tokenizer):
    tokenizer.chat_template = (
        "{% for m in messages %}{{ m.role + m.content + (m.name or '') }}{% for c in m.tool_calls or [] %}"
        "{% for key, value in c.function.arguments | items %}{{ key }}{% endfor %}{% endfor %}{% endfor %}"
    )
    with pytest.raises(DataError, match=r"^row: the chat template refuses the messages \(can only concatenate str"):
        prompt_text(tokenizer, [{"role": "user", "content": "hi", "name": 3}])
    called = {"role": "assistant", "tool_calls": [{"function": {"name": "add", "arguments": [1]}}]}
    with pytest.raises(DataError, match=r"^row: the chat template refuses the messages \(Can only get item pairs"):
        render_conversation(tokenizer, [{"role": "user", "content": "hi"}, called], "row")


@pytest.mark.parametrize(
    ("messages", "message"),
    [
        (TALK[:2], "the conversation has no assistant turn"),
        (TALK[2:], "the conversation begins with an assistant turn"),
        ([{"role": "user", "content": " "}, TALK[2]], "the prompt is empty"),
    ],
)
def test_conversations_that_teach_nothing_are_refused_by_row(tokenizer, messages, message):
    with pytest.raises(DataError) as error:
        render_conversation(tokenizer, messages, "talk.jsonl line 3")
    assert str(error.value).startswith(f"talk.jsonl line 3: {message}")


@pytest.fixture
def base_tokenizer(tokenizer):
    """As base models have it: texts end with another token than the turns of the chat template."""
    tokenizer.add_special_tokens({"eos_token": "<|endoftext|>"})
    tokenizer.chat_template = CHATML
    return tokenizer


def test_a_turn_is_trained_up_to_the_token_that_ends_it_and_not_what_the_template_writes_behind(base_tokenizer):
    end = base_tokenizer.convert_tokens_to_ids("<|end|>")
    assert base_tokenizer.eos_token_id != end
    token_ids, loss_mask = render_conversation(base_tokenizer, TALK, "row")
    trained = [text for is_trained, text in spans(base_tokenizer, token_ids, loss_mask) if is_trained]
    assert trained == ["5<|end|>", "it is 8<|end|>"]


def test_what_ends_a_turn_is_found_in_what_the_template_writes(tokenizer, base_tokenizer):
    end = base_tokenizer.convert_tokens_to_ids("<|end|>")
    assert turn_end_id(base_tokenizer) == end
    base_tokenizer.eos_token = "<|end|>"
    assert turn_end_id(base_tokenizer) == end
    base_tokenizer.chat_template = WITHOUT_END
    assert turn_end_id(base_tokenizer) == end
    for template in ("{{ raise_exception('no answers') }}", None):
        base_tokenizer.chat_template = template
        assert turn_end_id(base_tokenizer) is None


def test_plain_prompts_keep_what_the_tokenizer_puts_before_them_and_not_what_it_puts_behind(tokenizer):
    tokenizer.add_special_tokens({"bos_token": "<s>"})
    bos, eos = tokenizer.bos_token_id, tokenizer.eos_token_id
    ids = tokenizer.encode("2+3=")
    for template, before in (("<s> $A <|end|>", [bos]), ("$A <|end|>", []), ("<s> $A", [bos])):
        specials = [("<s>", bos), ("<|end|>", eos)]
        tokenizer.backend_tokenizer.post_processor = TemplateProcessing(single=template, special_tokens=specials)
        plain = {"apply_chat_template": False, "system_prompt": None, "origin": "row"}
        assert render_prompt(tokenizer, "2+3=", **plain) == before + ids
        token_ids, loss_mask = render_response_sample(tokenizer, "2+3=", "5", **plain)
        assert token_ids == [*before, *ids, *tokenizer.encode("5", add_special_tokens=False), eos]
        assert loss_mask == [False] * len(before + ids) + [True] * 2


def test_text_that_follows_text_has_no_space_that_was_not_written():
    """As SentencePiece puts one before the first word of every text."""
    words = {"<unk>": 0, "\n": 1, "▁": 2, "▁hello": 3, "world": 4, "▁world": 5, "</s>": 6}
    backend = Tokenizer(Unigram([(word, -float(rank)) for word, rank in words.items()], unk_id=0))
    backend.pre_tokenizer, backend.decoder = Metaspace(), MetaspaceDecoder()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="</s>", unk_token="<unk>")
    plain = {"apply_chat_template": False, "system_prompt": None, "origin": "row"}
    for response, ids in (("world", [4]), (" world", [5])):
        token_ids, _ = render_response_sample(tokenizer, "hello", response, **plain)
        assert token_ids == [3, *ids, 6]
        observed = render_observation(
            tokenizer, response, apply_chat_template=False, last_token_id=3, origin="row", max_chars=99
        )
        assert observed == ids


def test_tokens_that_are_added_later_may_end_turns(tokenizer):
    tokenizer.chat_template = "{% for m in messages %}{{ m['role'] + ':' + m['content'] + '<|new|>' }}{% endfor %}"
    tokenizer.eos_token = "<|end|>"
    assert turn_end_id(tokenizer) == tokenizer.eos_token_id
    tokenizer.add_special_tokens({"additional_special_tokens": ["<|new|>"]})
    assert turn_end_id(tokenizer) == tokenizer.convert_tokens_to_ids("<|new|>")
