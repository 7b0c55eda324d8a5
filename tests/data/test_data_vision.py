"""Images of rows: every form, every place, and what is wrong with them by row and file."""

import copy
import io
import json
import pickle
import shutil
from dataclasses import replace
from functools import partial

import pyarrow
import pytest
import torch
from family_table import FAMILIES
from hub_templates import GEMMA_3, LLAVA_1_5, LLAVA_1_6_MISTRAL, LLAVA_ONEVISION, SMOLVLM
from PIL import Image
from pyarrow import parquet
from tiny_models import GRID_FAMILIES, PLACED_FAMILIES, tiny_vision_model
from transformers import (
    AutoConfig,
    AutoTokenizer,
    Exaone4_5_Processor,
    Gemma3ImageProcessorPil,
    Glm4vImageProcessorPil,
    Glm4vProcessor,
    Glm46VImageProcessorPil,
    Glm46VProcessor,
    Qwen2_5_VLProcessor,
    Qwen2VLImageProcessorPil,
    Qwen2VLProcessor,
    Qwen3VLProcessor,
)
from vision_folders import MARK, MARKED, TEMPLATE, WORDS, tokenizer_with_images, vision_folder
from vision_samples import transformers_inputs, vision_families

from shardwise.config import DataError, ModelError, PreferenceDataConfig, PromptDataConfig, SupervisedDataConfig
from shardwise.data import ImageReader, Vision
from shardwise.data.images import file_of
from shardwise.data.preference import preference_pairs
from shardwise.data.rows import prompt_examples, supervised_samples
from shardwise.data.sources import Row
from shardwise.data.synthetic import train_tokenizer
from shardwise.model_config import media_token_ids
from shardwise.recipes.sampling.samples import to_samples
from shardwise.types import Completion, RolloutGroup

START, PAD, END, VIDEO_PAD = 261, 262, 263, 264


@pytest.fixture(scope="module")
def tokenizer():
    tokenizer = tokenizer_with_images(WORDS, MARK)
    assert tokenizer.convert_tokens_to_ids(WORDS) == [START, PAD, END, VIDEO_PAD]
    return tokenizer


@pytest.fixture(scope="module")
def model():
    found = tiny_vision_model("qwen3_vl")
    found.config.image_token_id = PAD
    return found


@pytest.fixture(scope="module")
def folder(model, tmp_path_factory):
    folder = tmp_path_factory.mktemp("model")
    model.config.save_pretrained(folder)
    Qwen2VLImageProcessorPil(patch_size=4, size={"shortest_edge": 64, "longest_edge": 1024}).save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def vision(folder, tokenizer):
    return Vision.load(folder, tokenizer)


@pytest.fixture
def picture():
    """A picture of its own for every number: 16 x 8 pixels, which are 4 x 2 patches and 2 tokens."""

    def make(number: int = 0, size=(16, 8), mode="RGB"):
        return Image.new("RGB", size, (number * 20 % 256, 90, 200)).convert(mode)

    return make


def encoded(image, kind="PNG", **options) -> bytes:
    file = io.BytesIO()
    image.save(file, kind, **options)
    return file.getvalue()


@pytest.fixture
def load(vision, tokenizer, tmp_path):
    def load_rows(rows, **settings):
        path = tmp_path / "rows.jsonl"
        if any(isinstance(value, bytes | dict) for row in rows for value in row.get("images") or []):
            path = tmp_path / "rows.parquet"
            parquet.write_table(pyarrow.Table.from_pylist(rows), path)
        else:
            path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
        loaded = supervised_samples(
            SupervisedDataConfig(**settings), [str(path)], tokenizer, max_rows=None, vision=vision
        )
        read = [
            replace(one, images=vision._reader.read(one.image_refs)) if one.image_refs else one for one in loaded.rows
        ]
        return read, loaded

    return load_rows


def talk(question, answer="5"):
    return [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]


IMAGE, TEXT = {"type": "image"}, {"type": "text", "text": "Which?"}


@pytest.mark.parametrize(
    "messages",
    [
        talk("<image>Which?<image>"),
        talk([IMAGE, TEXT, IMAGE]),
        talk([IMAGE, TEXT | {"image": None}, IMAGE | {"text": None}]),
        talk([IMAGE | {"image": "0.png"}, TEXT, IMAGE | {"path": "1.jpg"}]),
        talk([IMAGE | {"url": "0.png"}, TEXT, IMAGE | {"image": "1.jpg"}]),
    ],
)
def test_images_stand_where_the_messages_have_a_place_for_them(load, picture, vision, tokenizer, tmp_path, messages):
    """However they are written, the tokens are those of the chat template with as many image tokens as the processor
    says, the pixels are the processor's, and the positions the model's."""
    images = [picture(1), picture(2, (8, 24))]
    images[0].save(tmp_path / "0.png")
    images[1].save(tmp_path / "1.jpg")
    row = {"messages": messages}
    if not any(
        isinstance(part, dict) and any(map(part.get, ("image", "path", "url"))) for part in messages[0]["content"]
    ):
        row["images"] = ["0.png", "1.jpg"]
    (sample,), _ = load([row])
    words = [START, PAD, PAD, END, *tokenizer.encode("Which?"), START, PAD, PAD, PAD, END]
    expected = [*tokenizer.encode("<|user|>"), *words, *tokenizer.encode("<|end|><|assistant|>5<|end|>")]
    assert sample.token_ids.tolist() == expected
    assert tokenizer.decode(sample.token_ids[sample.loss_mask]) == "5<|end|>"
    found = vision._reader._processor._processor([images[0], Image.open(tmp_path / "1.jpg")], return_tensors="pt")
    assert torch.equal(sample.images.pixel_values, found["pixel_values"])
    assert sample.images.sizes.tolist() == [[1, 2, 4], [1, 6, 2]]


def test_positions_are_those_that_the_model_finds_itself(load, picture, model):
    (first, second), _ = load(
        [
            {"messages": talk("<image>a<image>"), "images": [encoded(picture()), encoded(picture(1, (24, 24)))]},
            {"messages": talk("2+3="), "images": None},
        ]
    )
    kinds = (first.token_ids == PAD).int()[None]
    expected, _ = model.model.get_rope_index(first.token_ids[None], kinds, first.images.sizes)
    assert torch.equal(first.position_ids, expected[:, 0])
    assert not torch.equal(first.position_ids[1], torch.arange(len(first.token_ids)))
    assert second.position_ids is None
    assert second.images is None


GLM_WORDS = ["<|begin_of_image|>", "<|image|>", "<|end_of_image|>", "<|video|>"]
GLM_TEMPLATE = """[gMASK]<sop>
{%- macro visible_text(content) -%}
    {%- if content is string -%}
        {{- content }}
    {%- elif content is iterable and content is not mapping -%}
        {%- for item in content -%}
            {%- if item is mapping and item.type == 'text' -%}
                {{- item.text }}
            {%- elif item is mapping and (item.type == 'image' or 'image' in item) -%}
                <|begin_of_image|><|image|><|end_of_image|>
            {%- elif item is mapping and (item.type == 'video' or 'video' in item) -%}
                <|begin_of_video|><|video|><|end_of_video|>
            {%- endif -%}
        {%- endfor -%}
    {%- endif -%}
{%- endmacro -%}
{%- for m in messages -%}
<|{{ m.role }}|>
{{ visible_text(m.content) }}<|end|>
{%- endfor -%}
{% if add_generation_prompt %}<|assistant|>
{% endif %}"""
"""What GLM-4.5V's does for messages of words and images."""


PROCESSORS = {
    "qwen2_vl": (Qwen2VLProcessor, Qwen2VLImageProcessorPil),
    "qwen2_5_vl": (Qwen2_5_VLProcessor, Qwen2VLImageProcessorPil),
    "glm4v": (Glm4vProcessor, Glm4vImageProcessorPil),
    "glm46v": (Glm46VProcessor, Glm46VImageProcessorPil),
    "glm4v_moe": (Glm4vProcessor, Glm4vImageProcessorPil),
    "glm_ocr": (Glm46VProcessor, Glm46VImageProcessorPil),
    "exaone4_5": (Exaone4_5_Processor, Qwen2VLImageProcessorPil),
}
"""Those that are not Qwen3-VL's."""


def learn_row(folder, tokenizer, config, messages, images, **settings):
    """The sample that a row becomes for the model in a folder."""
    (folder / "rows.jsonl").write_text(json.dumps({"messages": messages, "images": images}), encoding="utf-8")
    loaded = supervised_samples(
        SupervisedDataConfig(**settings),
        [str(folder / "rows.jsonl")],
        tokenizer,
        max_rows=None,
        vision=Vision.load(folder, tokenizer),
        media_token_ids=media_token_ids(config),
    )
    return loaded.rows[0]


def prepare_grid(family, folder, monkeypatch):
    """As `prepare_marked`."""
    kind, image_kind = PROCESSORS.get(family, (Qwen3VLProcessor, Qwen2VLImageProcessorPil))
    tokenizer, words = train_tokenizer(["2+3=5"], vocab_size=261), GLM_WORDS if family.startswith("glm") else WORDS
    tokenizer.add_special_tokens({"additional_special_tokens": words})
    tokenizer.chat_template = GLM_TEMPLATE if family.startswith("glm") else TEMPLATE
    model = tiny_vision_model(family)
    model.config.image_token_id, model.config.video_token_id = tokenizer.convert_tokens_to_ids([words[1], words[3]])
    model.config.text_config.vocab_size = len(tokenizer)
    model.config.save_pretrained(folder)
    image_processor = image_kind(patch_size=4, size={"shortest_edge": 64, "longest_edge": 1024})
    image_processor.save_pretrained(folder)
    monkeypatch.setattr(kind, "check_argument_for_proper_class", lambda *_: None)  # that of videos needs torchvision
    return model, tokenizer, kind(image_processor=image_processor, tokenizer=tokenizer)


@pytest.mark.parametrize("family", vision_families("qwen2_vl", "glm4v", of=GRID_FAMILIES))
def test_rows_are_what_the_models_own_processor_makes_of_them(family, tmp_path, monkeypatch):
    """Tokens, pixels and positions. GLM's shows videos by the token of images, between marks of their own."""
    model, tokenizer, processor = prepare_grid(family, tmp_path, monkeypatch)
    images = [Image.effect_noise(size, 90).convert("RGB") for size in ((16, 8), (20, 44))]
    for number, image in enumerate(images):
        image.save(tmp_path / f"{number}.png")
    messages = talk([IMAGE, TEXT, IMAGE])
    text = tokenizer.apply_chat_template(messages, tokenize=False)
    expected = processor(text=[text], images=images, return_tensors="pt")
    found = learn_row(tmp_path, tokenizer, model.config, messages, ["0.png", "1.png"])
    assert found.token_ids.tolist() == expected["input_ids"][0].tolist()
    read = ImageReader.load(tmp_path).read(found.image_refs)
    assert torch.equal(read.pixel_values, expected["pixel_values"])
    assert torch.equal(read.sizes, expected["image_grid_thw"])
    if family in PLACED_FAMILIES:
        positions, _ = model.model.get_rope_index(
            expected["input_ids"], expected["mm_token_type_ids"], image_grid_thw=expected["image_grid_thw"]
        )
        assert torch.equal(found.position_ids, positions[:, 0])
    else:
        assert found.position_ids is None
    for spelt in tokenizer.convert_ids_to_tokens([model.config.image_token_id, model.config.video_token_id]):
        with pytest.raises(DataError, match="the text "):
            learn_row(tmp_path, tokenizer, model.config, talk(f"a {spelt} b"), [])


def prepare_marked(family, folder, template=None):
    """Writes what a model of the family has in its folder beside weights; returns model, tokenizer and processor."""
    words, written, make_processor = MARKED[family]
    tokenizer = tokenizer_with_images(words, written)
    tokenizer.chat_template = template or tokenizer.chat_template
    model = tiny_vision_model(family)
    model.config.image_token_id = tokenizer.convert_tokens_to_ids(words[0])
    model.config.text_config.vocab_size = len(tokenizer)
    processor = make_processor(tokenizer)
    processor.image_processor.save_pretrained(folder)
    model.config.save_pretrained(folder)
    return model, tokenizer, processor


@pytest.mark.parametrize("family", MARKED)
def test_rows_with_marks_of_the_models_own_processor_are_what_it_makes_of_them(family, tmp_path):
    """Images may stand next to each other, for nothing looks for their borders."""
    model, tokenizer, processor = prepare_marked(family, tmp_path)
    images = [Image.effect_noise(size, 90).convert("RGB") for size in ((16, 8), (20, 44), (40, 33))]
    for number, image in enumerate(images):
        image.save(tmp_path / f"{number}.png")
    messages = talk([IMAGE, TEXT, IMAGE, IMAGE])
    text = tokenizer.apply_chat_template(messages, tokenize=False)
    expected = processor(text=[text], images=[images], return_tensors="pt")
    found = learn_row(tmp_path, tokenizer, model.config, messages, ["0.png", "1.png", "2.png"])
    assert found.token_ids.tolist() == expected["input_ids"][0].tolist()
    assert tokenizer.decode(found.token_ids[found.loss_mask]) == "5<|end|>"
    assert found.position_ids is None
    read = ImageReader.load(tmp_path).read(found.image_refs)
    assert int(read.num_tokens.sum()) == found.token_ids.tolist().count(model.config.image_token_id)
    for name, tensor in transformers_inputs(model, replace(found, images=read)).items():
        assert torch.equal(tensor, torch.as_tensor(expected[name])), name
    for spelt in {MARKED[family][0][0], MARKED[family][1].strip()}:
        with pytest.raises(DataError, match=r"the text has 1 times |messages have places for 1: .*there are images$"):
            learn_row(tmp_path, tokenizer, model.config, talk(f"a {spelt} b"), [])
    advice = (
        "text part or tool call spells it; remove it there"
        if MARKED[family][0][0] == "<image>"
        else "message writes it itself; wr"
    )
    with pytest.raises(DataError, match=rf"has 1 times '.*' for 0 images, so a {advice}"):
        learn_row(tmp_path, tokenizer, model.config, talk([{"type": "text", "text": MARKED[family][0][0]}]), [])


@pytest.mark.parametrize("family", MARKED)
def test_other_processes_can_be_given_what_shows_images(family, tmp_path):
    model, tokenizer, _ = prepare_marked(family, tmp_path)
    vision = Vision.load(tmp_path, tokenizer)
    other = pickle.loads(pickle.dumps(vision))
    image = vision.open(Image.new("RGB", (40, 30)), tmp_path, "an image")
    tokens = [tokenizer.convert_tokens_to_ids("5"), model.config.image_token_id]
    found = other.expand(tokens, [True, False], [image], "a row")
    assert found == vision.expand(tokens, [True, False], [image], "a row")
    assert len(found[0]) > image.num_tokens > 1


@pytest.mark.parametrize("template", [LLAVA_1_5, LLAVA_1_6_MISTRAL], ids=["llava-1.5", "llava-1.6"])
@pytest.mark.parametrize("family", ["llava", "llava_next"])
def test_rows_of_a_template_that_writes_images_first_have_them_first(family, template, tmp_path):
    model, tokenizer, processor = prepare_marked(family, tmp_path, template)
    picture = Image.effect_noise((20, 44), 90).convert("RGB")
    picture.save(tmp_path / "0.png")
    answer = {"role": "assistant", "content": [{"type": "text", "text": "5"}]}
    text = tokenizer.apply_chat_template([{"role": "user", "content": [IMAGE, IMAGE, TEXT]}, answer], tokenize=False)
    expected = processor(text=[text], images=[picture] * 2, return_tensors="pt")["input_ids"][0].tolist()
    learn = partial(learn_row, tmp_path, tokenizer, model.config)
    for first in ("<image><image>Which?", [IMAGE, IMAGE, TEXT]):
        found = learn(talk(first), ["0.png"] * 2)
        assert found.token_ids.tolist() == ended(tokenizer, expected)
        assert tokenizer.decode(found.token_ids[found.loss_mask]) in (" 5 <|end|>", " 5</s> <|end|>")
    for behind in ("<image>Which?<image>", [IMAGE, TEXT, IMAGE], [TEXT, IMAGE, IMAGE]):
        with pytest.raises(DataError, match=r"line 1: words stand before an image, .*; put the images first, or set"):
            learn(talk(behind), ["0.png"] * 2)


SEVERAL = [
    {"role": "system", "content": [{"type": "text", "text": "be "}, {"type": "text", "text": "brief"}]},
    {"role": "user", "content": [IMAGE, IMAGE, TEXT, {"type": "text", "text": "Or not?"}]},
    {"role": "assistant", "content": [{"type": "text", "text": "It is "}, {"type": "text", "text": "5."}]},
    {"role": "user", "content": [IMAGE, TEXT]},
    {"role": "assistant", "content": [{"type": "text", "text": "7"}]},
]
AMONG = [*SEVERAL[:3], {"role": "user", "content": [TEXT, IMAGE, TEXT, TEXT, IMAGE, TEXT]}, *SEVERAL[4:]]
"""Only for templates that write images in their places."""


def ended(tokenizer, token_ids):
    """As a row is whose template ends no turn: with the token that ends texts."""
    return token_ids if tokenizer.eos_token_id in token_ids else [*token_ids, tokenizer.eos_token_id]


def own_rendering(processor, messages, images):
    """The tokens that transformers makes of a conversation: template, placeholders and all."""
    seen = iter(images)
    shown = [
        {**message, "content": [part | ({"image": next(seen)} if part == IMAGE else {}) for part in message["content"]]}
        for message in messages
    ]
    template = processor.tokenizer.chat_template
    found = processor.apply_chat_template(shown, chat_template=template, tokenize=True, return_dict=True)
    return list(found["input_ids"][0])


ALL_FAMILIES = vision_families("qwen2_5_vl", "glm46v", *MARKED, of=[*GRID_FAMILIES, *MARKED])


@pytest.mark.parametrize("spaced", [False, True], ids=["as the hub has them", "a space behind every part"])
@pytest.mark.parametrize("family", ALL_FAMILIES)
def test_parts_are_written_as_the_processors_own_template_writes_them(family, spaced, tmp_path, monkeypatch):
    """Several of words and images in every role, token for token what `processor.apply_chat_template` gives."""
    if family in MARKED:
        model, tokenizer, processor = prepare_marked(family, tmp_path)
    else:
        model, tokenizer, processor = prepare_grid(family, tmp_path, monkeypatch)
    if spaced:
        for text in ("part['text']", "item.text"):
            tokenizer.chat_template = tokenizer.chat_template.replace(f"{text} }}}}", f"{text} + ' ' }}}}")
        assert " + ' '" in tokenizer.chat_template
    images = [Image.effect_noise(size, 90).convert("RGB") for size in ((16, 8), (20, 44), (40, 33))]
    for number, image in enumerate(images):
        image.save(tmp_path / f"{number}.png")
    for messages, count in ((SEVERAL, 3), (AMONG, 4)):
        seen = [*range(3), 0][:count]
        found = learn_row(tmp_path, tokenizer, model.config, messages, [f"{number}.png" for number in seen])
        assert found.token_ids.tolist() == own_rendering(processor, messages, [images[number] for number in seen])
        spoken = "It is  5. <|end|>7 <|end|>" if spaced else "It is 5.<|end|>7<|end|>"
        assert tokenizer.decode(found.token_ids[found.loss_mask]) == spoken


@pytest.mark.parametrize("template", [LLAVA_1_5, LLAVA_1_6_MISTRAL], ids=["llava-1.5", "llava-1.6"])
@pytest.mark.parametrize("family", ["llava", "llava_next"])
def test_parts_of_a_template_that_writes_images_first_are_written_as_it_does(family, template, tmp_path):
    """LLaVA 1.6's writes the first part alone of what is no user's: there they are joined."""
    model, tokenizer, processor = prepare_marked(family, tmp_path, template)
    picture = Image.effect_noise((20, 44), 90).convert("RGB")
    picture.save(tmp_path / "0.png")
    found = learn_row(tmp_path, tokenizer, model.config, SEVERAL, ["0.png"] * 3)
    whole = [
        message | {"content": [{"type": "text", "text": "".join(part["text"] for part in message["content"])}]}
        if message["role"] != "user" and template == LLAVA_1_6_MISTRAL
        else message
        for message in SEVERAL
    ]
    assert found.token_ids.tolist() == ended(tokenizer, own_rendering(processor, whole, [picture] * 3))


def test_llava_onevisions_template_is_taken_once_it_opens_an_answer_in_one_way(tmp_path):
    """That of the hub writes a space behind the role in a conversation, and none where an answer begins."""
    model, tokenizer, processor = prepare_marked("llava_onevision", tmp_path, LLAVA_ONEVISION)
    picture = Image.effect_noise((20, 44), 90).convert("RGB")
    picture.save(tmp_path / "0.png")
    with pytest.raises(DataError, match=r"not prefix-stable: it wrote .*set model\.chat_template=FILE to a template"):
        learn_row(tmp_path, tokenizer, model.config, talk([IMAGE, TEXT]), ["0.png"])
    opening = "message['role'] + ' '"
    assert opening in LLAVA_ONEVISION
    tokenizer.chat_template = LLAVA_ONEVISION.replace(opening, f"({opening}).replace('assistant ', 'assistant')")
    for images in (1, 3):
        messages = SEVERAL if images == 3 else talk([IMAGE, TEXT], [{"type": "text", "text": "5"}])
        found = learn_row(tmp_path, tokenizer, model.config, messages, ["0.png"] * images)
        assert found.token_ids.tolist() == ended(tokenizer, own_rendering(processor, messages, [picture] * images))
        assert {one.num_patches for one in found.image_refs} == ({3} if images == 1 else {1})


@pytest.mark.parametrize("family", ["idefics3", "smolvlm"])
def test_parts_of_a_template_that_opens_messages_by_what_comes_first_are_written_as_it_does(family, tmp_path):
    model, tokenizer, processor = prepare_marked(family, tmp_path, SMOLVLM)
    picture = Image.effect_noise((20, 44), 90).convert("RGB")
    picture.save(tmp_path / "0.png")
    for messages, count in ((SEVERAL, 3), (AMONG, 4)):
        found = learn_row(tmp_path, tokenizer, model.config, messages, ["0.png"] * count)
        assert found.token_ids.tolist() == own_rendering(processor, messages, [picture] * count)
        trained = tokenizer.decode(found.token_ids[found.loss_mask])
        assert trained == " It is 5.<end_of_utterance> 7<end_of_utterance>"


@pytest.mark.parametrize(
    ("family", "template", "ends_line"),
    [
        *(
            (family, template, True)
            for family in ("llava", "llava_next")
            for template in (LLAVA_1_5, LLAVA_1_6_MISTRAL)
        ),
        ("llava", None, True),
        ("internvl", None, True),
        ("mistral3", None, False),
    ],
)
def test_a_line_that_ends_behind_an_image_ends_once(family, template, ends_line, tmp_path):
    """In a string, as LLaVA's data have it, of a template that ends it itself; parts say what they say."""
    model, tokenizer, processor = prepare_marked(family, tmp_path, template)
    picture = Image.effect_noise((20, 44), 90).convert("RGB")
    picture.save(tmp_path / "0.png")
    answer = {"role": "assistant", "content": [{"type": "text", "text": "5"}]}
    for words, parts in (
        ("<image>\nWhich?", [IMAGE, {"type": "text", "text": "Which?" if ends_line else "\nWhich?"}]),
        ("<image>\n<image>\nWhich?", [IMAGE, IMAGE, {"type": "text", "text": "Which?"}] if ends_line else None),
        ("<image>\n\nWhich?", [IMAGE, {"type": "text", "text": "\nWhich?" if ends_line else "\n\nWhich?"}]),
        ([IMAGE, {"type": "text", "text": "\nWhich?"}], [IMAGE, {"type": "text", "text": "\nWhich?"}]),
    ):
        if parts is not None:
            images = [picture] * parts.count(IMAGE)
            found = learn_row(tmp_path, tokenizer, model.config, talk(words), ["0.png"] * len(images))
            expected = own_rendering(processor, [{"role": "user", "content": parts}, answer], images)
            assert found.token_ids.tolist() == ended(tokenizer, expected)


LINES = ["\n\n", "\n\n\n\n", "\n\n\n\n\n\n", "a\n\n\n"]
"""What a tokenizer learns to make one token of empty lines from."""


@pytest.fixture
def gemma(tmp_path):
    """`prepare_marked` with Gemma 3's template, and a tokenizer whose tokens may be several lines."""
    model, *_ = prepare_marked("gemma3", tmp_path)
    merging = train_tokenizer(["2+3=5", *LINES * 9], vocab_size=266)
    merging.add_special_tokens(
        {"additional_special_tokens": [*MARKED["gemma3"][0], "<start_of_turn>", "<end_of_turn>"]}
    )
    merging.chat_template = GEMMA_3
    model.config.image_token_id = merging.convert_tokens_to_ids(MARKED["gemma3"][0][0])
    model.config.text_config.vocab_size = len(merging)
    model.config.save_pretrained(tmp_path)
    for number, size in enumerate(((16, 8), (20, 44), (40, 33))):
        Image.effect_noise(size, 90).convert("RGB").save(tmp_path / f"{number}.png")
    return model, merging, MARKED["gemma3"][2](merging)


def first_part(words):
    """A system prompt, of which the template takes no other part."""
    return {"role": "system", "content": [{"type": "text", "text": words}]}


@pytest.mark.parametrize(
    ("messages", "same"),
    [
        (talk([IMAGE, TEXT]), "<image>Which?"),
        (talk([TEXT, IMAGE, IMAGE, TEXT]), "Which?<image><image>Which?"),
        ([first_part("Be brief."), *talk([IMAGE, TEXT])], "<image>Which?"),
        ([first_part("Be brief.\n\n"), *talk([IMAGE])], "<image>"),
        ([*talk([TEXT, IMAGE]), *talk([IMAGE], "7"), *talk([TEXT], "8"), *talk([IMAGE, TEXT], "9")], None),
    ],
)
def test_lines_around_an_image_become_tokens_with_those_of_the_words_beside_it(gemma, tmp_path, messages, same):
    """As in Gemma 3's own processor, which writes them into the text: the mark of an image alone would be other
    tokens. Prompts and preference pairs read the same, and contents that are strings."""
    model, tokenizer, processor = gemma
    messages = [
        one | {"content": [{"type": "text", "text": one["content"]}]} if isinstance(one["content"], str) else one
        for one in messages
    ]
    count = sum(one["content"].count(IMAGE) for one in messages)
    names = [f"{number % 3}.png" for number in range(count)]
    images = [Image.open(tmp_path / name) for name in names]
    expected = own_rendering(processor, messages, images)
    turn = tokenizer.convert_tokens_to_ids("<end_of_turn>")
    expected = expected[: len(expected) - expected[::-1].index(turn)]  # nothing learns from the line behind
    learn = partial(learn_row, tmp_path, tokenizer, model.config)
    found = learn(messages, names)
    assert found.token_ids.tolist()[: len(expected)] == expected
    learnt = [message["content"][0]["text"] for message in messages if message["role"] == "assistant"]
    assert tokenizer.decode(found.token_ids[found.loss_mask]) == "".join(f"{words}<end_of_turn>" for words in learnt)
    assert any(len(token.strip("\u010a")) == 0 < 2 < len(token) for token in tokenizer.convert_ids_to_tokens(expected))
    if same is not None:
        strings = [{**message, "content": message["content"][0].get("text", same)} for message in messages]
        strings[-2]["content"] = same
        assert torch.equal(learn(strings, names).token_ids, found.token_ids)
    vision, path = Vision.load(tmp_path, tokenizer), tmp_path / "more.jsonl"
    row = {"prompt": messages[:-1], "chosen": messages[-1:], "rejected": talk("?", "None.")[1:], "images": names}
    path.write_text(json.dumps(row | {"answer": "5"}), encoding="utf-8")
    data = [str(path)], tokenizer
    pairs = preference_pairs(PreferenceDataConfig(), *data, max_rows=None, vision=vision).rows
    config = PromptDataConfig(ground_truth_column="answer")
    (asked,) = prompt_examples(config, *data, max_rows=None, vision=vision).rows
    length = len(asked.prompt_ids)
    assert asked.prompt_ids == expected[:length]
    assert torch.equal(pairs[0].token_ids, found.token_ids)
    assert pairs[1].token_ids[:length].tolist() == asked.prompt_ids
    assert not found.loss_mask[length - 1]
    assert found.loss_mask[length]


@pytest.mark.parametrize("spelt", MARKED["gemma3"][0][:2])
def test_what_gemma_3_knows_an_image_by_is_no_word_of_a_row(gemma, tmp_path, spelt):
    model, tokenizer, _ = gemma
    learn = partial(learn_row, tmp_path, tokenizer, model.config)
    both = "'<start_of_image>' or '<image_soft_token>'"
    for messages, names, count in (
        (talk(f"a {spelt}"), [], 1),
        (talk("a", f"{spelt} b"), [], 1),
        (talk(f"<image>a {spelt}"), ["0.png"], 2),
        (talk([IMAGE, {"type": "text", "text": spelt}]), ["0.png"], 2),
    ):
        with pytest.raises(
            DataError, match=rf"line 1: the text has {count} times {both} for {len(names)} images, so a"
        ):
            learn(messages, names)


def test_a_tokenizer_that_does_not_name_the_marks_of_gemma_3_learns_words_alone(gemma, tmp_path):
    model, tokenizer, _ = gemma
    nameless = copy.deepcopy(tokenizer)
    del nameless._special_tokens_map["boi_token"]
    plain = learn_row(tmp_path, nameless, model.config, talk("Which?"), [])
    assert torch.equal(plain.token_ids, learn_row(tmp_path, tokenizer, model.config, talk("Which?"), []).token_ids)
    with pytest.raises(ModelError, match="the tokenizer does not say what its boi_token is"):
        learn_row(tmp_path, nameless, model.config, talk("<image>Which?"), ["0.png"])


@pytest.mark.parametrize(
    "limit", [pytest.param(limit, marks=() if limit % 2 else pytest.mark.full) for limit in range(18, 50)]
)
def test_of_a_truncated_row_images_are_kept_before_what_is_trained_and_whole(limit, tmp_path):
    """Pixtral's have tokens among and behind theirs that are not those of images."""
    model, tokenizer, _ = prepare_marked("mistral3", tmp_path)
    Image.effect_noise((20, 44), 90).convert("RGB").save(tmp_path / "0.png")
    messages = [*talk("q", "first"), *talk([IMAGE, TEXT], "second")]
    whole = learn_row(tmp_path, tokenizer, model.config, messages, ["0.png"])
    found = learn_row(
        tmp_path, tokenizer, model.config, messages, ["0.png"], max_sequence_tokens=limit, on_overlong="truncate"
    )
    length = len(found.token_ids)
    assert length <= limit
    assert torch.equal(found.token_ids, whole.token_ids[:length])
    if length < len(whole.token_ids):
        assert found.loss_mask[-1]
    assert torch.equal(found.loss_mask, whole.loss_mask[:length])
    assert not whole.loss_mask[length:limit].any()
    assert found.image_refs == (whole.image_refs if model.config.image_token_id in found.token_ids else [])


LONG = "A" * 100_000
"""As base64 is."""


@pytest.mark.filterwarnings("ignore::PIL.Image.DecompressionBombWarning")
@pytest.mark.parametrize(
    ("question", "images", "reason"),
    [
        ("<image><image>", ["ok.png"], 'column "images" has 1 images, and the messages have places for 2'),
        ("<image>", ["ok.png", "ok.png"], 'column "images" has 2 images, and the messages have places for 1'),
        ("2+3=", ["ok.png"], 'column "images" has 1 images, and the messages have places for 0'),
        ("<image>", [], 'column "images" has 0 images, and the messages have places for 1'),
        ("<image>", [], '. Where <image> is text, give the message as {"role": ..., "content": [{"type": "text", '),
        ("<image><|image_pad|>", ["ok.png"], "the text has 2 times '<|image_pad|>' for 1 images"),
        ("<image>", ["none.png"], "image 1 (none.png): there is no file"),
        ("<image>", ["text.png"], "image 1 (text.png) is damaged, or no image: none of JPEG, PNG, WEBP"),
        ("<image>", ["https://example.org/a.png"], "image 1: 'https://example.org/a.png' is a URL; download"),
        ("<image>", ["file:///data/a.png"], "image 1: 'file:///data/a.png' is a URL; give the path alone, without"),
        ("<image>", [LONG], f"image 1 ({LONG[:60]}...): there is no file"),
        ("<image>", [f"data:image/png;base64,{LONG}"], "AAAAA...' is a data URL; decode it, and give a file's path or"),
        ("<image>", ["."], "is a folder; give the path of an image file in it"),
        ("<image>", [""], "is a folder; give the path of an image file in it"),
        ("<image>", [7], "image 1 is a number, expected a path"),
        ("<image>", ["long.png"], "image 1 (long.png) has 402 x 2 pixels, sides of more than the 1 to 200 that are"),
        ("<image>", ["huge.png"], "image 1 (huge.png) has 10000 x 9000 pixels, more than the 89,478,485 that are read"),
        ("<image>", ["huger.png"], "image 1 (huger.png) has more than the 89,478,485 pixels that are read; scale it"),
        ("<image>", ["deep.png"], "image 1 (deep.png) has the mode I;16, more than 8 bits a channel"),
        ([{"type": "video"}], [], 'a part of a content is {"type": "video"}, expected {"type": "text"'),
        (
            [IMAGE | {"img": "ok.png"}],
            ["ok.png"],
            'a part of a content is {"type": "image", "img": "ok.png"}, expected',
        ),
        (
            [IMAGE | {"image": "ok.png", "path": "ok.png"}],
            [],
            'a part of a content is {"type": "image", "image": "ok.png"',
        ),
        ([IMAGE | {"url": "http://a.org/b.png"}], [], "image 1: 'http://a.org/b.png' is a URL; download the image"),
    ],
)
def test_what_is_wrong_with_an_image_names_row_and_file(load, picture, tmp_path, question, images, reason):
    pictures = {
        "ok.png": picture,
        "long.png": partial(picture, 0, (402, 2)),
        "huge.png": partial(Image.new, "1", (10000, 9000)),
        "huger.png": partial(Image.new, "1", (20000, 9000)),
        "deep.png": partial(Image.new, "I;16", (16, 8)),
    }
    for name, draw in pictures.items():
        if name in images or name == "ok.png":
            draw().save(tmp_path / name)
    (tmp_path / "text.png").write_text("no image")
    rows = [{"messages": talk("1")}, {"messages": talk(question), "images": images}]
    with pytest.raises(DataError) as error:
        load(rows)
    assert str(error.value).startswith("rows.jsonl line 2: ")
    assert reason in str(error.value)
    assert len(str(error.value)) < 600


@pytest.mark.parametrize("kind", ["PNG", "JPEG"])
def test_a_file_that_breaks_off_is_named_when_it_is_read(load, tmp_path, kind):
    """Its size stands at its beginning."""
    noise = Image.effect_noise((64, 64), 90).convert("RGB")
    (tmp_path / "half").write_bytes(encoded(noise, kind)[:1500])
    with pytest.raises(DataError, match=r"^rows\.jsonl line 1: image 1 \(half\) is damaged: .*replace it"):
        load([{"messages": talk("<image>"), "images": ["half"]}])


def test_an_image_that_would_be_cut_in_two_goes_with_the_end_of_its_row(load, picture, tokenizer):
    data = encoded(picture(0, (24, 24)))  # nine tokens
    messages = [*talk("<image>"), *talk("<image>")]
    row = {"messages": messages, "images": [data, data]}
    whole = len(load([row])[0][0].token_ids)
    (sample,), loaded = load([row], max_sequence_tokens=whole - 6, on_overlong="truncate")
    assert loaded.counts == {"num_rows": 1, "num_dropped": 0, "num_truncated": 1}
    assert sample.images.sizes.tolist() == [[1, 6, 6]]
    assert tokenizer.decode(sample.token_ids).endswith("5<|end|>")
    assert sample.position_ids.shape == (3, len(sample.token_ids))
    with pytest.raises(DataError, match="0 of 1 rows left"):  # nothing before the first image is trained
        load([row], max_sequence_tokens=6, on_overlong="truncate")
    with pytest.raises(DataError, match=rf"the sequence has {whole} tokens, of which 18 stand for 2 images, more than"):
        load([row], max_sequence_tokens=whole - 6)


def test_a_prompt_with_a_response_has_images_too(load, picture, tokenizer):
    """A string is the user's message."""
    pair = {"prompt": "<image>Which?", "response": "5", "images": [encoded(picture())]}
    conversation = {"messages": talk("<image>Which?"), "images": [encoded(picture())]}
    ((first,), _), ((second,), _) = load([pair]), load([conversation])
    assert first.token_ids.tolist() == second.token_ids.tolist()
    assert torch.equal(first.images.pixel_values, second.images.pixel_values)
    assert tokenizer.decode(first.token_ids[first.loss_mask]) == "5<|end|>"


@pytest.fixture
def ask(vision, tokenizer, tmp_path):
    def read(rows, *, vision=vision, media_token_ids=(), **settings):
        path = tmp_path / "prompts.jsonl"
        path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
        config = PromptDataConfig(ground_truth_column="answer", **settings)
        return prompt_examples(
            config, [str(path)], tokenizer, max_rows=None, vision=vision, media_token_ids=media_token_ids
        ).rows

    return read


def test_a_prompt_that_spells_the_image_token_is_refused_also_where_no_images_are_shown(ask, picture, tmp_path):
    picture().save(tmp_path / "a.png")
    row = {"prompt": "What is <|image_pad|>?", "answer": "5"}
    with pytest.raises(DataError, match=r"line 1: the text has 1 times '<\|image_pad\|>' for 0 images"):
        ask([row], media_token_ids=[PAD])
    with pytest.raises(DataError, match=r"line 1: the text spells '<\|image_pad\|>', .* none is shown here"):
        ask([row], media_token_ids=[PAD], vision=None)
    assert ask([row | {"prompt": "<image>What?", "images": ["a.png"]}], media_token_ids=[PAD])


def test_a_row_that_spells_a_token_of_images_or_videos_is_refused_whether_images_are_shown_or_not(
    vision, tokenizer, tmp_path
):
    def learn(text, vision, media_token_ids):
        path = tmp_path / "rows.jsonl"
        path.write_text(json.dumps({"messages": talk(text)}), encoding="utf-8")
        return supervised_samples(
            SupervisedDataConfig(),
            [str(path)],
            tokenizer,
            max_rows=None,
            vision=vision,
            media_token_ids=media_token_ids,
        ).rows

    with pytest.raises(DataError, match=r"^rows\.jsonl line 1: the text has 1 times '<\|image_pad\|>' for 0 images"):
        learn("a <|image_pad|>", vision, [PAD, VIDEO_PAD])
    for text, shown in (("a <|image_pad|>", None), ("a <|video_pad|>", None), ("a <|video_pad|>", vision)):
        with pytest.raises(
            DataError, match=r"^rows\.jsonl line 1: the text spells '<\|(image|video)_pad\|>', by which"
        ):
            learn(text, shown, [PAD, VIDEO_PAD])
    (found,) = learn("a <|video_pad|>", None, [])  # to a model of words it is a word
    assert VIDEO_PAD in found.token_ids


@pytest.mark.parametrize(
    "family", vision_families("qwen2_5_vl", "qwen3_vl", "qwen3_vl_moe", "qwen3_5", of=PLACED_FAMILIES)
)
def test_images_with_nothing_between_are_refused_for_no_family_tells_them_apart(tokenizer, picture, tmp_path, family):
    grids = torch.tensor([[1, 2, 4], [1, 6, 2]])
    tokens = torch.tensor([[5, *[PAD] * 5, 6]])
    with pytest.raises(RuntimeError, match="must match the existing size"):
        tiny_vision_model(family).model.get_rope_index(tokens, (tokens == PAD).int(), image_grid_thw=grids)
    bare = copy.deepcopy(tokenizer)
    bare.chat_template = TEMPLATE.replace("<|vision_start|>", "").replace("<|vision_end|>", "")
    folder = tmp_path / "model"
    config = tiny_vision_model(family).config
    config.image_token_id = PAD
    config.save_pretrained(folder)
    Qwen2VLImageProcessorPil(patch_size=4, size={"shortest_edge": 64, "longest_edge": 1024}).save_pretrained(folder)
    picture(1).save(tmp_path / "a.png")
    path = tmp_path / "rows.jsonl"

    def learn(question, images):
        path.write_text(json.dumps({"messages": talk(question), "images": images}), encoding="utf-8")
        vision = Vision.load(folder, bare)
        return supervised_samples(SupervisedDataConfig(), [str(path)], bare, max_rows=None, vision=vision).rows

    with pytest.raises(DataError) as error:
        learn("<image>Which?<image><image>", ["a.png"] * 3)
    assert str(error.value).startswith("rows.jsonl line 1: nothing stands between image 2 and image 3, which the model")
    assert "set model.chat_template=FILE to a template that writes a mark around every image" in str(error.value)
    (found,) = learn("<image>or<image>?", ["a.png"] * 2)
    assert found.token_ids.tolist().count(PAD) == 4
    assert found.position_ids.shape == (3, len(found.token_ids))


def test_prompts_show_what_conversations_show(ask, load, picture, tokenizer, tmp_path):
    """Tokens, places and pixels of a prompt are those with which a conversation that begins with it begins."""
    picture(3).save(tmp_path / "a.png")
    words = {"prompt": [{"role": "user", "content": "<image>Which?"}], "answer": "5"}
    shown, plain = ask([words | {"images": ["a.png"]}, words | {"prompt": "Which?"}])
    (expected,), _ = load([{"messages": talk("<image>Which?"), "images": ["a.png"]}])
    length = len(shown.prompt_ids)
    assert shown.prompt_ids == expected.token_ids[:length].tolist()
    assert torch.equal(shown.position_ids, expected.position_ids[:, :length])
    assert [one.size for one in shown.image_refs] == [one.size for one in expected.image_refs]
    assert shown.prompt.count(tokenizer.decode([PAD])) == 1
    assert (plain.image_refs, plain.position_ids) == ([], None)
    group = RolloutGroup(
        example=shown,
        completions=[
            Completion(
                token_ids=expected.token_ids[length:].tolist(),
                logprobs=[0.0] * (len(expected.token_ids) - length),
                finish_reason="stop",
                policy_version=0,
            )
        ],
        texts=["5"],
        answers=["5"],
        rewards=[1.0],
        reward_parts=[{}],
        failures=[None],
    )
    (sample,) = to_samples([group])
    assert torch.equal(sample.token_ids, expected.token_ids)
    assert torch.equal(sample.position_ids, expected.position_ids)
    assert sample.image_refs == shown.image_refs


def test_messages_stay_as_their_row_has_them_for_another_model(ask, vision, picture, tmp_path):
    """Which takes the same from them, with the images as a column; a system prompt of the config has none."""
    picture(3).save(tmp_path / "a.png")
    parts = [IMAGE | {"image": "a.png"}, {"type": "text", "text": "Spell <image>."}]
    rows = [
        {"prompt": "<image>\nWhich?<image>", "images": ["a.png", "a.png"], "answer": "5"},
        {"prompt": [*talk(parts, "<image>")[:1], *talk("<image>", "A cat.")], "images": ["a.png"], "answer": "5"},
        {"prompt": "2+3=", "answer": "5"},
    ]
    shown, several, plain = ask(rows, system_prompt="See <image>.")
    system = {"role": "system", "content": [{"type": "text", "text": "See <image>."}]}
    assert shown.messages == [system, {"role": "user", "content": "<image>\nWhich?<image>"}]
    assert several.messages == [
        system,
        {"role": "user", "content": [IMAGE, {"type": "text", "text": "Spell <image>."}]},
        *talk("<image>", "A cat."),
    ]
    assert plain.messages == [{"role": "system", "content": "See <image>."}, {"role": "user", "content": "2+3="}]
    for example, num_images in ((shown, 2), (several, 2)):
        row = Row({"images": [file_of(one) for one in example.image_refs]}, "a.jsonl line 1", "a")
        taken, image_refs = vision.take(example.messages, row, "images")
        assert [one.path for one in image_refs] == [str(tmp_path / "a.png")] * num_images
        assert sum(list(message["content"]).count(IMAGE) for message in taken) == num_images


def test_the_file_of_an_image_is_its_path_or_its_bytes(vision, picture, tmp_path):
    picture(3).save(tmp_path / "a.png")
    assert file_of(vision.open("a.png", tmp_path, "it")) == str(tmp_path / "a.png")
    assert file_of(vision.open(encoded(picture(3)), tmp_path, "it")) == encoded(picture(3))


def test_prompts_whose_images_cannot_be_shown_are_refused(ask, picture, tmp_path):
    picture().save(tmp_path / "a.png")
    row = {"prompt": "<image>Which?", "answer": "5", "images": ["a.png"]}
    with pytest.raises(DataError, match=r"line 1: column \"images\" has images, .* rollout\.engine=embedded"):
        ask([row], vision=None)
    with pytest.raises(
        DataError,
        match=r"tokens, of which 2 stand for 1 image, more .*=3; .* to drop \(one with images is not truncated\)$",
    ):
        ask([row], max_prompt_tokens=3, on_overlong="truncate")


def test_images_for_a_model_that_sees_none_are_refused(tokenizer, picture, tmp_path):
    path = tmp_path / "rows.jsonl"
    path.write_text(json.dumps({"messages": talk("<image>"), "images": ["a.png"]}))
    with pytest.raises(DataError, match=r'line 1: column "images" has images, which supervised, preference and'):
        supervised_samples(SupervisedDataConfig(), [str(path)], tokenizer, max_rows=None)
    loaded = supervised_samples(SupervisedDataConfig(images_column="none"), [str(path)], tokenizer, max_rows=None)
    assert "<image>" in tokenizer.decode(loaded.rows[0].token_ids)


@pytest.mark.parametrize("family", ["aria", "granite4_vision", "qwen3_omni_moe_thinker"])
def test_images_of_a_family_that_training_shows_none_to_are_refused_by_its_name(ask, tokenizer, tmp_path, family):
    """Whose processor lies in the folder: rows of words are learnt from."""
    AutoConfig.for_model(family, **FAMILIES[family]).save_pretrained(tmp_path)
    Gemma3ImageProcessorPil().save_pretrained(tmp_path)
    vision = Vision.load(tmp_path, tokenizer)

    def learn(row):
        (tmp_path / "rows.jsonl").write_text(json.dumps(row), encoding="utf-8")
        data = SupervisedDataConfig(), [str(tmp_path / "rows.jsonl")], tokenizer
        return supervised_samples(*data, max_rows=None, vision=vision, media_token_ids=[PAD]).rows[0]

    reason = rf", and the family {family} learns from words alone .*; use a model of one of them, or leave all but text"
    column, part = r'has images in its column "images"', r'has {"type": "(image|video)", .*} in a content'
    for row, what in (
        ({"messages": talk("<image>Which?"), "images": ["a.png"]}, column),
        ({"messages": talk([IMAGE | {"image": "a.png"}, TEXT])}, part),
        ({"messages": talk([{"type": "video", "video": "a.mp4"}, TEXT])}, part),
        ({"prompt": "<image>", "response": "5", "images": ["a.png"]}, column),
    ):
        with pytest.raises(DataError, match=f"line 1: the row {what}{reason}"):
            learn(row)
    with pytest.raises(DataError, match=f"{column}{reason}"):
        ask([{"prompt": "<image>Which?", "answer": "5", "images": ["a.png"]}], vision=vision)
    plain = learn({"messages": talk("2+3=")})
    assert plain.image_refs == []
    for parts in ([{"type": "text", "text": "2+3="}], [{"type": "text", "text": "2+"}, {"type": "text", "text": "3="}]):
        same = learn({"messages": talk(parts), "images": [None]})
        assert same.token_ids.tolist() == plain.token_ids.tolist()
    assert learn({"prompt": "2+3=", "response": "5", "images": None}).image_refs == []
    with pytest.raises(DataError, match=r"line 1: the text spells '<\|image_pad\|>'"):
        learn({"messages": talk("<|image_pad|>")})


def edited(folder, target, name, **keys):
    """A copy of a folder with other keys in one of its files."""
    path = shutil.copytree(folder, target) / name
    path.write_text(json.dumps((json.loads(path.read_text()) if path.exists() else {}) | keys))
    return target


PREPROCESSOR = "preprocessor_config.json"


@pytest.mark.parametrize(
    ("family", "name", "keys", "reason"),
    [
        ("qwen3_vl", PREPROCESSOR, {"processor_class": "Qwen3VLProcessor", "min_pixels": None}, None),
        ("qwen3_vl", PREPROCESSOR, {"resample": 2}, "prepares images with resample=2, and the model whose tokens it"),
        ("qwen3_vl", PREPROCESSOR, {"size": {"shortest_edge": 64, "longest_edge": 512}}, "prepares images with size="),
        (
            "qwen3_vl",
            PREPROCESSOR,
            {"image_processor_type": "Glm4vImageProcessor"},
            "images with image_processor_type=",
        ),
        ("qwen3_vl", PREPROCESSOR, {"image_processor_type": "CLIPImageProcessor"}, "is shown none: "),
        ("qwen3_vl", PREPROCESSOR, {"do_resize": False}, "is shown none: "),
        ("llava", "config.json", {"vision_feature_select_strategy": "full"}, "has another vision tower (LlavaTower("),
        ("mistral3", "processor_config.json", {"image_break_token": "[IMG_END]"}, "writes other tokens for an image; "),
        ("mistral3", "processor_config.json", {"image_break_token": "<none>"}, "is shown none: "),
    ],
)
def test_another_model_is_shown_the_same_or_it_is_said_why_not(family, name, keys, reason, tmp_path):
    """The first case has another file, of another release, that says the same."""
    vision_folder(family, tmp_path / "own")
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "own")
    own = Vision.load(tmp_path / "own", tokenizer)
    other = Vision.load(edited(tmp_path / "own", tmp_path / "other", name, **keys), tokenizer)
    assert own.difference(own) is None
    assert own.difference(None).startswith("sees no images, for its folder")
    found = own.difference(other)
    assert found == reason or reason in found
    if reason is None:
        picture = Image.effect_noise((60, 44), 90).convert("RGB")
        pixels = [one._reader.read([one.open(picture, tmp_path, "it")]).pixel_values for one in (own, other)]
        assert torch.equal(*pixels)


def test_what_this_model_itself_lacks_is_not_said_of_the_other(tmp_path):
    vision_folder("mistral3", tmp_path / "whole")
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "whole")
    keys = {"image_break_token": "<none>"}
    lacking = edited(tmp_path / "whole", tmp_path / "lacking", "processor_config.json", **keys)
    whole, own = (Vision.load(folder, tokenizer) for folder in (tmp_path / "whole", lacking))
    missing = f"{lacking}: the tokenizer has no token '<none>'"
    assert own.difference(whole).startswith(
        f"is shown none, for the model whose tokens it reads places none: {missing}"
    )
    assert whole.difference(own).startswith(f"is shown none: {missing}")


def test_another_model_that_counts_positions_in_another_way_is_known(vision, tokenizer, model):
    def shifted(*given, **sizes):
        positions, delta = model.model.get_rope_index(*given, **sizes)
        return positions + 1, delta

    other = Vision(tokenizer, vision._reader, vision._tokens, shifted)
    assert vision.difference(other).startswith("counts the places of an image's tokens in another way; ")
    assert vision.difference(Vision(tokenizer, vision._reader, vision._tokens, None)) is not None


def test_a_chat_template_without_images_is_refused(folder, picture, tmp_path):
    silent = train_tokenizer(["2+3=5"], vocab_size=261)
    silent.add_special_tokens({"additional_special_tokens": WORDS})
    vision = Vision.load(folder, silent)
    row = Row({"images": [encoded(picture())]}, "a.jsonl line 1", "a", tmp_path)
    with pytest.raises(ModelError, match=r"writes '' for an image, .* set model\.chat_template=FILE"):
        vision.take(talk("<image>"), row, "images")


def test_a_folder_that_does_not_say_how_images_are_prepared_shows_none(model, tokenizer, tmp_path):
    model.config.save_pretrained(tmp_path)
    assert Vision.load(tmp_path, tokenizer) is None
