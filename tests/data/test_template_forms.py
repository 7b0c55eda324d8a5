"""What chat templates of the hub and others take for contents."""

from copy import copy

import pytest
from hub_templates import LLAVA_1_5, LLAVA_1_6_MISTRAL, LLAVA_ONEVISION, SMOLVLM
from vision_folders import MARK, TEMPLATE, WORDS, tokenizer_with_images

from shardwise.data.chat import render_prompt
from shardwise.data.template_forms import (
    IMAGE,
    ImageForm,
    form_of_words,
    formed,
    image_form,
    joined,
    takes_parts,
    text_part,
)

STRINGS = "{% for m in messages %}{{ '<|' + m.role + '|>' + m.content }}{% endfor %}"
"""Adds contents to strings, so it refuses lists, as those of Qwen2.5 and Llama do."""
AS_IT_IS = "{% for m in messages %}{{ m.role }}: {{ m.content }} {% endfor %}"
"""Writes a list as Python does."""
AS_JSON = (
    "{% for m in messages %}{{ m.role }}: {{ m.content if m.content is string else m.content | tojson }} {% endfor %}"
)
SILENT = "{% for m in messages %}{{ m.content if m.content is string else '' }};{% endfor %}"
"""Leaves lists out, as Qwen3's does."""
LINES = (
    "{% for m in messages %}{{ '<|' + m.role + '|>' }}{% for part in m.content %}"
    "{{ '<|image_pad|>' if part.type == 'image' else part.text + '\n' }}{% endfor %}{{ '<|end|>' }}{% endfor %}"
)
"""Ends every part of words as a line."""
FIRST_PART = (
    "{% for m in messages %}{% if m.role == 'user' and m.content is not string %}{{ '[INST]' }}"
    "{% for part in m.content %}{{ part.text if part.type == 'text' else '<|image_pad|>' }}{% endfor %}{{ '[/INST]' }}"
    "{% else %}{{ m.content if m.content is string else m.content[0].text }}{% endif %}{% endfor %}"
)
"""Takes all parts of a user and the first of others, as that of Mistral Small 3.1 does."""
SORTED = FIRST_PART.replace(
    "m.content %}{{ part", "(m.content | sort(attribute='type') if m.content | length == 2 else m.content) %}{{ part"
)
"""Puts an image before the words beside it where nothing else is there, as that of Ministral 3 does."""

INTO_THE_FIRST = (
    "{% set system = messages[0].content if messages[0].role == 'system' else '' %}"
    "{% for m in messages if m.role != 'system' %}{{ '<|' + m.role + '|>' }}"
    "{% set before = system ~ (tools | tojson if tools else '') if loop.first else '' %}"
    "{% if before %}{{ before ~ m.content }}{% elif m.content is string %}{{ m.content }}"
    "{% else %}{% for part in m.content %}{{ part.text }}{% endfor %}{% endif %}{% endfor %}"
)
"""Writes a system prompt and tools into the first message, and of that one the list itself, as that of Llama 4 does
beside tools."""
REFUSING = INTO_THE_FIRST.replace("before ~ m.content", "before + m.content")
"""The same, but it refuses the list there."""


@pytest.fixture(scope="module")
def tokenizer():
    return tokenizer_with_images(WORDS, MARK)


ROLES = ("system", "user", "assistant", "tool")


@pytest.mark.parametrize(
    ("template", "words", "images"),
    [
        (STRINGS, "", ""),
        (AS_IT_IS, "", ""),
        (AS_JSON, "", ""),
        (SILENT, "", ""),
        (TEMPLATE, "system user assistant tool", "system user assistant tool"),
        (LINES, "system user assistant tool", "system user assistant tool"),
        (FIRST_PART, "user", "user"),
        (SORTED, "user", "user"),
        (LLAVA_1_5, "system user assistant tool", "system user assistant tool"),
        (LLAVA_1_6_MISTRAL, "user", "user"),
        (SMOLVLM, "system user assistant tool", "system user assistant tool"),
    ],
)
def test_roles_whose_parts_a_template_writes_are_known(tokenizer, template, words, images):
    for with_image, expected in ((False, words), (True, images)):
        found = [role for role in ROLES if takes_parts(tokenizer, template, role, with_image=with_image)]
        assert " ".join(found) == expected


TOOL = {"type": "function", "function": {"name": "add", "parameters": {"type": "object", "properties": {}}}}


@pytest.mark.parametrize("template", [INTO_THE_FIRST, REFUSING])
@pytest.mark.parametrize("system_prompt", [None, "Add."])
@pytest.mark.parametrize("tools", [[], [TOOL]])
def test_parts_beside_a_system_prompt_or_tools_are_what_their_words_are(tokenizer, template, system_prompt, tools):
    """Whatever the template makes of a list alone in a conversation."""
    own = copy(tokenizer)
    own.chat_template = template

    def rendered(content):
        messages = [{"role": "user", "content": content}]
        options = {"apply_chat_template": True, "system_prompt": system_prompt, "origin": "a row"}
        return render_prompt(own, messages, tools=tools, **options)

    assert rendered([text_part("2+"), text_part("3=")]) == rendered("2+3=")


@pytest.mark.parametrize("template", [INTO_THE_FIRST, REFUSING])
def test_a_template_takes_parts_only_if_it_does_wherever_it_takes_words(tokenizer, template):
    assert not takes_parts(tokenizer, template, "user", with_image=False)
    assert takes_parts(tokenizer, template, "assistant", with_image=False)
    assert takes_parts(tokenizer, TEMPLATE, "user", with_image=True, with_tools=True)


@pytest.mark.parametrize(
    ("template", "expected"),
    [
        (TEMPLATE, ImageForm(MARK, "in place")),
        (TEMPLATE.replace(MARK, "<|image_pad|>\n"), ImageForm("<|image_pad|>\n", "in place")),
        (LINES, ImageForm("<|image_pad|>", "in place")),
        (FIRST_PART, ImageForm("<|image_pad|>", "in place")),
        (SORTED, ImageForm("<|image_pad|>", "in place")),
        (LLAVA_ONEVISION, ImageForm("<image>\n", "in front")),
        (SMOLVLM, ImageForm("<image>", "in place")),
        (LLAVA_1_5, ImageForm("<image>\n", "in front")),
        (LLAVA_1_6_MISTRAL, ImageForm("<image>\n", "in front")),
        (STRINGS, ImageForm("", "elsewhere")),
        (AS_IT_IS, ImageForm("", "elsewhere")),
        (SILENT, ImageForm("", "elsewhere")),
    ],
)
def test_what_a_template_writes_for_an_image_is_found_with_its_place(tokenizer, template, expected):
    assert image_form(tokenizer, template) == expected


PARTS = [text_part("2+"), IMAGE, text_part("3=")]


@pytest.mark.parametrize(
    ("template", "role", "expected"),
    [
        (TEMPLATE, "user", PARTS),
        (LINES, "tool", PARTS),
        (FIRST_PART, "user", PARTS),
        (FIRST_PART, "assistant", "2+<|image_pad|>3="),
        (LLAVA_1_6_MISTRAL, "assistant", [text_part("2+<image>\n3=")]),
    ],
)
def test_parts_stay_where_the_template_writes_all_of_them_and_are_joined_elsewhere(tokenizer, template, role, expected):
    assert formed(tokenizer, template, {"role": role, "content": PARTS, "name": "a"}) == {
        "role": role,
        "content": expected,
        "name": "a",
    }


def test_words_have_the_form_that_the_template_takes(tokenizer):
    message = {"role": "user", "content": "2+3="}
    assert formed(tokenizer, STRINGS, message) == formed(tokenizer, TEMPLATE, message) == message
    assert formed(tokenizer, LINES, message) == {"role": "user", "content": [text_part("2+3=")]}
    with pytest.raises(ValueError, match="writes no word of a user's message"):
        form_of_words(tokenizer, "{% for m in messages %}{{ m.role }}{% endfor %}")


def test_joined_parts_are_one_string():
    assert joined(PARTS, "<i>") == "2+<i>3="
    assert joined([], "<i>") == ""
