"""Model families, one by one: those that are proven, as the record says, and those that are refused."""

import re
from pathlib import Path

import pytest
import torch
from family_checks import CPU, eager_logprobs, sequences
from family_table import COMMON, FAMILIES, REFUSED, language_model, random_model, save_model
from ranks import RankError
from torch import nn
from transformers import (
    AutoConfig,
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    Gemma3Config,
    PaliGemmaConfig,
    PaliGemmaForConditionalGeneration,
)

from shardwise.config import FrozenEngineConfig, ModelError, UserError
from shardwise.data.packing import pack, unpack
from shardwise.engine import TrainEngine
from shardwise.families import (
    decoder_layers,
    families_of,
    hand_on_keywords,
    language_model_class,
    proven_record,
    sees_images_both_ways,
    unseen_modules,
    unsupported_reason,
    vision_reason,
    wrapper_reason,
)
from shardwise.rollout import EmbeddedEngine
from shardwise.types import GenerateRequest, Sample

LEADING = {
    *("qwen2", "qwen3", "qwen2_moe", "qwen3_moe", "qwen3_next", "qwen3_5_text", "llama", "llama4_text", "mistral"),
    *("ministral", "mixtral", "gemma", "gemma2", "gemma3_text", "deepseek_v2", "deepseek_v3", "gpt_oss", "glm4"),
    *("glm4_moe", "phi3", "olmo2", "olmo3", "olmoe", "granite", "granitemoe", "starcoder2", "stablelm", "cohere2"),
    *("smollm3", "ernie4_5", "ernie4_5_moe", "seed_oss", "exaone4", "falcon_h1", "lfm2", "qwen2_5_vl", "qwen3_vl"),
}
"""Families of `make test`. The others: make test-full, which also proves all of the record."""

LONGEST = 19
"""Tokens of the longest of `sequences` and its completion."""
LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 1e4,
    "short_factor": [1.0, 1.1, 1.3, 1.9],
    "long_factor": [2.0, 2.5, 4.0, 8.0],
    "original_max_position_embeddings": LONGEST,
}
BATCH_DEPENDENT = {
    "phi3 longrope": {"rope_parameters": LONGROPE, "original_max_position_embeddings": LONGEST},
    "phimoe longrope": FAMILIES["phimoe"] | {"rope_parameters": LONGROPE | {"short_mscale": 1.2, "long_mscale": 1.5}},
    "llama dynamic": {
        "rope_parameters": {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4},
        "max_position_embeddings": LONGEST,
    },
}
"""The model type, and of longer sequences the rotary frequencies would depend on the batch."""


LENGTHS = (9, 5, 13, 5)


def train_logprobs(
    folder: str, lengths: tuple[int, ...] = LENGTHS, allow_unproven: bool = False
) -> list[torch.Tensor] | str:
    """By the engine on a rank, all sequences in one pack; or why it refused."""
    tokens = sequences(lengths)
    samples = [Sample(uid=str(i), token_ids=t, loss_mask=torch.arange(len(t)) > 0) for i, t in enumerate(tokens)]
    step = pack(samples, num_shards=1, max_tokens=64)
    try:
        engine = TrainEngine.build(Path(folder), FrozenEngineConfig(allow_unproven=allow_unproven), device=CPU)
        return unpack(step, [[output.logprobs for output in engine.forward(step.shards[0])]])
    except ModelError as error:
        return str(error)


def generate(folder: Path, max_tokens: int = 6, allow_unproven: bool = False):
    engine = EmbeddedEngine.from_folder(
        folder, dtype=torch.float32, max_rows=3, device=CPU, allow_unproven=allow_unproven
    )
    requests = [
        GenerateRequest(uid=str(i), prompt_ids=t.tolist(), num_completions=2, max_tokens=max_tokens, temperature=1.0)
        for i, t in enumerate(sequences())
    ]
    return engine.generate(requests)


@pytest.mark.parametrize(
    "family",
    [*(name if name in LEADING else pytest.param(name, marks=pytest.mark.full) for name in FAMILIES), *BATCH_DEPENDENT],
)
def test_packed_sequences_of_a_family_are_what_transformers_computes_of_each_alone(run_ranks, tmp_path, family):
    model = save_model(family, (FAMILIES | BATCH_DEPENDENT)[family], tmp_path)
    assert len(decoder_layers(model)) == model.config.get_text_config().num_hidden_layers
    (found,) = run_ranks(train_logprobs, 1, str(tmp_path))
    assert not isinstance(found, str), found
    for tokens, logprobs in zip(sequences(), found, strict=True):
        torch.testing.assert_close(logprobs[1:], eager_logprobs(model, tokens), atol=2e-5, rtol=0)


@pytest.mark.parametrize("family", BATCH_DEPENDENT)
def test_completions_up_to_the_limit_are_scored_as_transformers_scores_each_alone(tmp_path, family):
    model = save_model(family, BATCH_DEPENDENT[family], tmp_path)
    for tokens, group in zip(sequences(), generate(tmp_path), strict=True):
        for completion in group:
            whole = torch.cat([tokens, torch.tensor(completion.token_ids)])
            expected = eager_logprobs(model, whole)[len(tokens) - 1 :]
            torch.testing.assert_close(torch.tensor(completion.logprobs), expected, atol=2e-5, rtol=0)


@pytest.mark.parametrize("family", BATCH_DEPENDENT)
def test_a_sequence_that_would_change_the_frequencies_of_others_is_refused(run_ranks, tmp_path, family):
    """transformers gives a sequence other logprobs where it is in one batch with a longer one."""
    model = save_model(family, BATCH_DEPENDENT[family], tmp_path)
    (tokens,) = sequences((LONGEST,))
    alone = eager_logprobs(model, tokens)
    longer = torch.cat([tokens, tokens[:1]])
    with torch.no_grad():
        logits = model(input_ids=torch.stack([longer, longer.flip(0)]), use_cache=False).logits[0, : LONGEST - 1]
    beside_longer = logits.log_softmax(dim=-1).gather(1, tokens[1:, None])[:, 0]
    assert (beside_longer - alone).abs().max() > 0.01

    (found,) = run_ranks(train_logprobs, 1, str(tmp_path), (5, LONGEST + 1))
    with pytest.raises(ModelError) as error:
        generate(tmp_path, max_tokens=7)
    for text in (found, str(error.value)):
        assert f"a sequence of {LONGEST + 1} tokens is longer than the {LONGEST} of " in text
        assert text.endswith(
            f"max_position_embeddings in config.json, and with rope_type {family.split()[1]} the rotary frequencies of "
            "longer sequences depend on the longest one of a batch; use shorter ones"
        )


@pytest.mark.parametrize("family", REFUSED)
def test_family_that_would_be_computed_wrong_is_refused(run_ranks, tmp_path, family):
    """Also where what is unproven is allowed."""
    options, message = REFUSED[family]
    save_model(family, options, tmp_path)
    (found,) = run_ranks(train_logprobs, 1, str(tmp_path), LENGTHS, True)
    assert isinstance(found, str), "the engine gave numbers"
    with pytest.raises(ModelError, match=message) as error:
        generate(tmp_path, allow_unproven=True)
    with pytest.raises(ModelError, match=message):
        raise ModelError(found)
    assert proven_record()[family] == {"packing": found.removeprefix(f"{tmp_path}: ")}
    for text in (found, str(error.value)):
        assert "is not supported: it" in text
        assert family.replace("_text", "").replace("_", "") in text.lower().replace("_", "")


WRAPPERS = {
    "llama4": {
        "text_config": COMMON | FAMILIES["llama4_text"],
        "vision_config": {
            **COMMON,
            **dict.fromkeys(["vision_output_dim", "projector_input_dim", "projector_output_dim"], 32),
            "intermediate_size": 128,
            "image_size": 16,
            "patch_size": 4,
        },
    },
}


@pytest.fixture(params=WRAPPERS)
def whole(request, tmp_path):
    """The folder of a whole checkpoint, as save_pretrained writes it."""
    torch.manual_seed(0)
    config = AutoConfig.for_model(request.param, **WRAPPERS[request.param])
    AutoModelForImageTextToText.from_config(config, dtype=torch.float32).save_pretrained(tmp_path / request.param)
    return tmp_path / request.param


def test_a_whole_checkpoint_is_refused_by_its_own_name_and_its_language_model_alone_is_computed_right(
    run_ranks, whole, tmp_path
):
    """What the error and docs/models.md say to do works."""
    family = whole.name
    refused = f"{family} is not supported|not proven for the family {family},"
    with pytest.raises(RankError, match=refused):
        run_ranks(build_trainer, 1, str(whole))
    with pytest.raises(UserError, match=refused):
        generate(whole)
    model = AutoModelForCausalLM.from_pretrained(whole, dtype=torch.float32, attn_implementation="eager").eval()
    model.save_pretrained(tmp_path / "alone")
    (found,) = run_ranks(train_logprobs, 1, str(tmp_path / "alone"))
    for tokens, logprobs in zip(sequences(), found, strict=True):
        torch.testing.assert_close(logprobs[1:], eager_logprobs(model, tokens), atol=2e-5, rtol=0)


def build_trainer(folder):
    TrainEngine.build(Path(folder), FrozenEngineConfig(), device=CPU)


@pytest.mark.parametrize("whole", ["llama4"], indirect=True)
def test_a_whole_checkpoint_of_which_a_part_would_be_read_says_what_to_do_also_where_unproven_is_allowed(
    run_ranks, whole
):
    """Its weights would not be found by the names of the language model."""
    message = (
        f"{whole}: llama4 is not supported: it has other models around the language model llama4_text, which alone is "
        "trained and sampled from; write that to a folder of its own with transformers, "
        "AutoModelForCausalLM.from_pretrained(FOLDER).save_pretrained(NEW), copy the tokenizer's files there and give "
        "NEW"
    )
    for allow_unproven in (False, True):
        assert run_ranks(train_logprobs, 1, str(whole), LENGTHS, allow_unproven) == [message]
        with pytest.raises(ModelError) as error:
            generate(whole, allow_unproven=allow_unproven)
        assert str(error.value) == message


@pytest.mark.parametrize("family", ["llama", "gemma3", "qwen3_5", "exaone"])
def test_a_checkpoint_that_is_built_whole_or_proven_is_no_wrapper(family):
    """exaone: one whose language model transformers computes with the class of another family."""
    config = AutoConfig.for_model(family)
    model_class = language_model_class(config, AutoModelForCausalLM, AutoModelForImageTextToText, AutoModel)
    assert wrapper_reason(config, model_class) is None


def tiny(family="llama", **options):
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(AutoConfig.for_model(family, **COMMON | options))


def test_a_decoder_without_causal_attention_is_refused():
    model = tiny()
    assert unsupported_reason(model) is None
    model.model.layers[1].self_attn.is_causal = False
    assert unsupported_reason(model) == (
        "LlamaForCausalLM (model_type llama) is not supported: it has attention that is not causal"
    )


def test_layers_that_share_weights_are_refused():
    """Zamba2 has one block for many of its layers."""

    def zamba(num_hybrid):
        layers = ["linear_attention", "hybrid"] * num_hybrid
        places = [place for place, kind in enumerate(layers) if kind == "hybrid"]
        own = {"layer_types": layers, "num_hidden_layers": len(layers), "hybrid_layer_ids": places, "num_mem_blocks": 1}
        return tiny("zamba2", **FAMILIES["zamba2"] | own)

    assert unsupported_reason(zamba(1)) is None
    reason = r"\(model_type zamba2\) is not supported: it shares weights between its layers \(.*\.3\..* = .*\.1\."
    assert re.search(reason, unsupported_reason(zamba(2)))


@pytest.mark.parametrize(
    ("forward", "reason"),
    [
        (lambda input_ids, **kwargs: None, "takes no position_ids"),
        (lambda input_ids, position_ids: None, "does not pass keyword arguments on to its attention"),
    ],
)
def test_a_forward_that_takes_too_little_is_refused(forward, reason):
    """Without a check the positions of a pack would be swallowed, each sequence begin where the last ended."""
    model = tiny()
    model.model.forward = forward
    assert unsupported_reason(model).endswith(f"it {reason}")


def test_a_model_without_its_list_of_layers_is_refused():
    model = tiny()
    model.config.num_hidden_layers = 3
    assert decoder_layers(model) == []
    assert unsupported_reason(model).endswith("it has no list of num_hidden_layers=3 decoder layers")


def test_decoder_layers_are_neither_experts_nor_those_of_an_image_encoder():
    model = tiny()
    layers = list(model.model.layers)
    for layer in layers:
        layer.mlp.experts = nn.ModuleList([nn.Identity(), nn.Identity()])
    assert decoder_layers(model) == layers
    vision = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2}
    config = Gemma3Config(text_config=COMMON | {"head_dim": 8}, vision_config=vision)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    assert decoder_layers(model) == list(model.model.language_model.layers)
    assert unsupported_reason(model) is None


def test_a_pack_in_which_llama_4_would_scale_queries_by_their_place_is_refused(run_ranks, tmp_path):
    """Its layers without rotary positions scale by the place in the batch, from floor_scale tokens on."""
    model = save_model("llama4_text", FAMILIES["llama4_text"] | {"floor_scale": 16}, tmp_path)
    (found,) = run_ranks(train_logprobs, 1, str(tmp_path), (9, 6))
    for tokens, logprobs in zip(sequences((9, 6)), found, strict=True):
        torch.testing.assert_close(logprobs[1:], eager_logprobs(model, tokens), atol=2e-5, rtol=0)
    (found,) = run_ranks(train_logprobs, 1, str(tmp_path), (9, 7))
    assert "a pack of 16 tokens is longer than the 15 up to which attn_temperature_tuning does not" in found
    assert found.endswith("lower engine.max_tokens_per_micro_batch")


@pytest.mark.parametrize("family", ["stablelm", "nemotron", "llama"])
def test_what_every_layer_is_given_reaches_its_attention_and_is_kept_for_one_pass(family, tmp_path):
    """llama hands it on by itself."""
    model = save_model(family, FAMILIES[family], tmp_path)
    hand_on_keywords(model)
    given, seen = [object(), object()], []

    def note(_attention, _args, keywords):
        seen.append(keywords.get("packed"))

    for layer in decoder_layers(model):
        layer.self_attn.register_forward_pre_hook(note, with_kwargs=True)
    tokens = torch.tensor([[5, 6, 7]])
    for value in given:
        model(input_ids=tokens, packed=value)
    model(input_ids=tokens)
    assert seen == [given[0], given[0], given[1], given[1], None, None]


def test_what_no_word_reaches_is_named():
    """What lies beside a language model that learns from words alone, and what its layers have for images."""
    layer = "model.language_model.layers.1.mlp.vision_moe"
    beside = {
        "gemma3": [],
        "ovis2": ["model.vision_tower", "model.visual_embeddings_table"],
        "mistral3": [],
        "ernie4_5_vl_moe": [layer, "model.vision_tower", "model.resampler_model"],
        "qwen3_omni_moe_thinker": ["model.audio_tower", "model.visual"],
        "qwen3_vl": [],
        "llama4_text": [],
    }
    assert {family: unseen_modules(random_model(family, FAMILIES[family])) for family in beside} == beside


@pytest.mark.parametrize(
    ("family", "reason"),
    [
        ("qwen3_vl", None),
        ("exaone4_5", None),
        ("gemma3", None),
        ("gemma4", None),
        ("qwen3_omni_moe_thinker", "it has no mm_token_type_ids among what get_rope_index takes"),
        ("hunyuan_vl", "it has no vision tower of a kind that images are prepared for"),
    ],
)
def test_a_model_is_shown_images_if_its_tower_and_its_positions_are_of_a_known_kind(family, reason):
    found = vision_reason(random_model(family, FAMILIES[family]))
    assert found == reason or found.endswith(f"is not supported as a model that sees images: {reason}")


def test_a_model_whose_words_see_others_behind_them_where_there_are_images_is_shown_none():
    """PaliGemma's see all of their prompt."""
    vision = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    text = COMMON | {"model_type": "gemma", "head_dim": 8}
    with torch.device("meta"):
        model = PaliGemmaForConditionalGeneration(PaliGemmaConfig(text_config=text, vision_config=vision))
    assert "images: where there are images tokens see others behind them, in a way of its own" in vision_reason(model)


def test_gemma_4_sees_images_both_ways_where_its_config_says_so():
    options = FAMILIES["gemma4"]
    assert sees_images_both_ways(random_model("gemma4", options))
    causal = options | {"text_config": options["text_config"] | {"use_bidirectional_attention": None}}
    model = random_model("gemma4", causal)
    assert not sees_images_both_ways(model)
    assert vision_reason(model) is None


def test_a_whole_checkpoint_is_built_where_transformers_has_a_class_for_all_but_its_head():
    """Of Llama 4 it has none, and what it has computes no words without images."""

    def built(family, **options):
        config = AutoConfig.for_model(family, **options)
        model_class = language_model_class(config, AutoModelForCausalLM, AutoModelForImageTextToText, AutoModel)
        return model_class._model_mapping[type(config)].__name__

    for name in ("Qwen3_5ForConditionalGeneration", "MllamaForConditionalGeneration"):
        family = {"Qwen3_5": "qwen3_5", "Mllama": "mllama"}[name.partition("For")[0]]
        assert built(family, architectures=[name]) == name
        assert built(family).endswith("ForCausalLM")
    assert built("llama4", architectures=["Llama4ForConditionalGeneration"]) == "Llama4ForCausalLM"


@pytest.mark.parametrize(
    ("family", "language_model", "key"),
    [
        ("gemma3", FAMILIES["gemma3"]["text_config"] | {"final_logit_softcapping": 2.0}, "final_logit_softcapping"),
        ("aya_vision", language_model("cohere2", logit_scale=0.4), "logit_scale"),
        ("llava_next", language_model("granite", logits_scaling=3.0), "logits_scaling"),
        ("gemma4", FAMILIES["gemma4"]["text_config"] | {"final_logit_softcapping": 2.0}, None),
        ("aya_vision", language_model("cohere2", logit_scale=1.0), None),
        ("llava_next", language_model("granite", logits_scaling=1.0), None),
    ],
)
def test_what_becomes_of_logits_is_refused_where_the_class_of_a_whole_checkpoint_leaves_it_out(
    family, language_model, key
):
    """Its language model alone applies it, and so would the engine."""
    options = (FAMILIES | {name: row[0] for name, row in REFUSED.items()})[family]
    reason = unsupported_reason(random_model(family, options | {"text_config": language_model}))
    assert reason is None if key is None else f"it sets text_config.{key}, which its class does not apply" in reason
    assert unsupported_reason(random_model("gemma3_text", FAMILIES["gemma3_text"])) is None


def test_layers_that_see_nothing_but_images_are_refused():
    options, _ = REFUSED["mllama"]
    reason = unsupported_reason(random_model("mllama", options))
    assert "it has layers that see nothing but images (cross_attention_layers=[1])" in reason


@pytest.mark.parametrize(
    ("family", "expected"),
    [
        ("llama", ["llama"]),
        ("llava", ["llava", "llama"]),
        ("mistral3", ["mistral3", "ministral3"]),
        ("gemma3", ["gemma3", "gemma3_text"]),
        ("qwen3_vl", ["qwen3_vl"]),
    ],
)
def test_the_families_of_a_checkpoint_are_its_own_and_that_of_the_language_model_in_it(family, expected):
    config = AutoConfig.for_model(family, **FAMILIES[family])
    assert families_of(config, AutoModelForCausalLM, AutoModelForImageTextToText) == expected


@pytest.mark.parametrize("inner", ["mistral", "mistral4"])
def test_a_tower_goes_with_other_language_models_than_the_one_it_was_proven_with(run_ranks, tmp_path, inner):
    """Mistral Small 3 and 4 have one model_type."""
    options = FAMILIES["mistral3"] | {"text_config": language_model(inner, **FAMILIES[inner])}
    model = save_model("mistral3", options, tmp_path)
    (found,) = run_ranks(train_logprobs, 1, str(tmp_path))
    for tokens, logprobs in zip(sequences(), found, strict=True):
        torch.testing.assert_close(logprobs[1:], eager_logprobs(model, tokens), atol=2e-5, rtol=0)
