"""Prompts with images in vLLM, against transformers. It needs torchvision, which only `make test-vllm` has."""

import importlib.util
from copy import deepcopy
from dataclasses import replace
from functools import partial

import pytest
import torch
from tiny_models import IMAGE, VIDEO, VISION_END, VISION_START, tiny_vision_model
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from transformers import GenerationConfig, PreTrainedTokenizerFast, Qwen2VLImageProcessorPil
from vision_samples import assert_scores_of, reference_logprobs, request_of, vision_sample
from vllm_engines import ARGS, CPU, needs_vllm, open_engine

from shardwise.config import ConfigError, ModelError, VllmRollout
from shardwise.ops import Place, traced
from shardwise.rollout import VllmEngine
from shardwise.rollout.vllm_prompts import engine_input, shows_images
from shardwise.types import Sample

HEADS = {"num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 32}
SIZES = {"qwen2_5_vl": {"num_attention_heads": 1, "num_key_value_heads": 1}, "qwen3_vl": HEADS}
"""Heads wide enough for vLLM's kernels on a CPU."""
GRIDS = [[(1, 4, 6), (1, 2, 2)], [], [(1, 6, 8)], [(1, 8, 4), (1, 2, 2), (1, 4, 4)]]
MAX_TOKENS = 8
asking = partial(request_of, max_tokens=MAX_TOKENS, temperature=1.0)
needs_torchvision = pytest.mark.skipif(
    importlib.util.find_spec("torchvision") is None, reason="torchvision is not installed"
)


@pytest.fixture(scope="module", params=SIZES)
def model(request):
    rope = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [8, 4, 4]}
    if request.param == "qwen3_vl":
        rope["mrope_interleaved"] = True
    model = tiny_vision_model(request.param, rope_parameters=rope, **SIZES[request.param])
    model.generation_config = GenerationConfig(eos_token_id=3, pad_token_id=0)
    return model.eval()


@pytest.fixture(scope="module")
def folder(model, tmp_path_factory):
    return tiny_folder_that_sees(model, tmp_path_factory.mktemp("model"))


def tiny_folder_that_sees(model, folder):
    """With a tokenizer of words w0, w1, ... and the four that Qwen's processors look for."""
    model.save_pretrained(folder)
    special = {IMAGE: "<|image_pad|>", VIDEO: "<|video_pad|>"}
    special |= {VISION_START: "<|vision_start|>", VISION_END: "<|vision_end|>"}
    words = {special.get(number, f"w{number}"): number for number in range(131)}
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=Tokenizer(WordLevel(words, unk_token="w4")))
    tokenizer.add_special_tokens({"additional_special_tokens": list(special.values())})
    assert tokenizer.convert_tokens_to_ids("<|image_pad|>") == IMAGE
    tokenizer.save_pretrained(folder)
    Qwen2VLImageProcessorPil(patch_size=4, size={"shortest_edge": 64, "longest_edge": 4096}).save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def samples(model):
    return [vision_sample(model, f"row {index}", grids, seed=index) for index, grids in enumerate(GRIDS)]


@pytest.fixture(scope="module")
def engine(folder):
    return open_engine(folder, args={"limit_mm_per_prompt": {"image": 3, "video": 0}})


@torch.no_grad()
def assert_own_logprobs(model, sample: Sample, completion, atol=2e-5) -> None:
    tokens = torch.cat([sample.token_ids, torch.tensor(completion.token_ids)])
    mask = torch.arange(len(tokens)) >= len(sample.token_ids)
    expected = reference_logprobs(model, replace(sample, token_ids=tokens, loss_mask=mask))[mask]
    torch.testing.assert_close(torch.tensor(completion.logprobs), expected, atol=atol, rtol=0)


@needs_vllm
@needs_torchvision
def test_completions_of_prompts_with_images_are_sampled_by_the_policy(model, samples, engine):
    """Prompts with several images, one and none at the same time, which share their prefixes."""
    groups = engine.generate([asking(sample, num_completions=3) for sample in samples])
    for sample, group in zip(samples, groups, strict=True):
        assert len({tuple(one.token_ids) for one in group}) > 1
        for completion in group:
            assert not {IMAGE, VIDEO} & set(completion.token_ids)
            assert_own_logprobs(model, sample, completion)


@needs_vllm
@needs_torchvision
def test_other_pixels_at_the_same_tokens_give_other_logprobs(model, samples, engine):
    """Not those that the cache of prefixes, or of images, has kept."""
    sample = samples[2]
    (first,), (again,) = engine.generate([asking(sample)]), engine.generate([asking(sample)])
    assert first == again
    other = replace(sample, images=replace(sample.images, pixel_values=sample.images.pixel_values.flip(0)))
    ((found,),) = engine.generate([asking(other)])
    assert found.logprobs != first[0].logprobs
    assert_own_logprobs(model, other, found)


@needs_vllm
@needs_torchvision
def test_logprobs_of_known_prompts_are_those_that_the_policy_gives_behind_their_images(model, samples, engine):
    found = engine.logprobs([s.token_ids.tolist() for s in samples], [s.images for s in samples])
    assert_scores_of(model, samples, found, atol=2e-5)


@needs_vllm
@needs_torchvision
def test_a_trace_has_the_names_that_transformers_has_for_a_model_that_sees_images(model, engine):
    tokens = [25, 26, 27, 40, 29, 31]
    with engine.trace() as tracing:
        engine.logprobs([tokens])
    with traced(model.named_modules()) as expecting, torch.no_grad():
        model(torch.tensor([tokens]))
    found, expected = tracing.of_passes([len(tokens)]), expecting.of_passes([len(tokens)])
    for name in ("embed_tokens", "layers.0.input_layernorm", "layers.0", "layers.1", "norm"):
        place = Place(f"model.language_model.{name}", "output")
        torch.testing.assert_close(found[place], expected[place], atol=1e-4, rtol=1e-4, msg=name)


@needs_vllm
@needs_torchvision
def test_what_was_sampled_before_an_interruption_goes_on_behind_the_images(model, samples, engine):
    sample = samples[0]
    ((whole,),) = engine.generate([asking(sample, temperature=0.0)])
    rest = asking(sample, temperature=0.0, partial_token_ids=whole.token_ids[:3], max_tokens=MAX_TOKENS - 3)
    ((found,),) = engine.generate([rest])
    assert found.token_ids == whole.token_ids[3:]


@needs_vllm
@needs_torchvision
def test_new_weights_reach_images_that_were_seen_before(model, samples, engine):
    asked = [asking(sample, temperature=0.0) for sample in samples]
    before = engine.generate(asked)
    served, changed = dict(engine.served_weights()), deepcopy(model)
    with torch.no_grad():
        for name, parameter in changed.named_parameters():
            parameter.mul_(1.5 if "visual" in name else 0.9)
    weights, others = (
        {name: tensor for name, tensor in one.state_dict().items() if name in served} for one in (model, changed)
    )
    engine.load_weights(others.items())
    engine.commit_weights(1)
    try:
        for sample, (completion,) in zip(samples, engine.generate(asked), strict=True):
            assert_own_logprobs(changed, sample, completion)
    finally:
        engine.load_weights(weights.items())
        engine.commit_weights(0)
    assert engine.generate(asked) == before


@needs_vllm
@needs_torchvision
def test_linear_attention_goes_with_images_and_new_weights(tmp_path):
    """Qwen3.5, for which vLLM's CPU build has kernels of bfloat16 alone, and for these sizes."""
    rope = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 1, 1], "mrope_interleaved": True}
    linear = {"linear_num_value_heads": 4, "linear_key_head_dim": 128, "linear_value_head_dim": 128}
    model = tiny_vision_model("qwen3_5", rope_parameters=rope, **HEADS, **linear).eval()
    engine = open_engine(tiny_folder_that_sees(model, tmp_path), dtype=torch.bfloat16)
    samples = [vision_sample(model, f"row {index}", grids, seed=index) for index, grids in enumerate(GRIDS)]
    for factor in (1.0, 1.5):
        model.load_state_dict({name: factor * tensor for name, tensor in model.state_dict().items()})
        weights = {name: tensor.bfloat16() for name, tensor in model.state_dict().items()}
        engine.load_weights((name, weights[name]) for name in dict(engine.served_weights()))
        engine.commit_weights(0)
        for sample, (completion,) in zip(samples, engine.generate([asking(sample) for sample in samples]), strict=True):
            assert_own_logprobs(model, sample, completion, atol=0.1)
            if sample.images is not None:  # the bound tells pictures from each other
                other = replace(sample, images=replace(sample.images, pixel_values=sample.images.pixel_values.flip(0)))
                with pytest.raises(AssertionError, match="not close"):
                    assert_own_logprobs(model, other, completion, atol=0.1)


@needs_vllm
@needs_torchvision
def test_prompts_and_images_that_do_not_fit_are_refused_and_the_next_one_is_answered(samples, engine):
    for wrong in (replace(samples[0], images=samples[2].images), replace(samples[0], images=None)):
        with pytest.raises(ModelError, match=r"row 0: the prompt has 7 image tokens .* images take"):
            engine.generate([asking(wrong)])
    assert engine.generate([asking(samples[0])])


def test_images_of_a_family_that_counts_positions_are_refused_by_its_name():
    """Text of it is served all the same."""
    model = tiny_vision_model("exaone4_5")
    with pytest.raises(ConfigError, match=r"row 0 has images, .* for the family exaone4_5; use rollout\.engine=embedd"):
        engine_input(asking(vision_sample(model, "row 0", [(1, 2, 2)], seed=0)), model)
    assert not shows_images(model)
    assert shows_images(tiny_vision_model("qwen3_vl"))


@needs_vllm
@needs_torchvision
@pytest.mark.parametrize("missing", ["mrope_section", "mrope_interleaved"])
def test_positions_that_vllm_would_take_for_others_are_refused(tmp_path, missing):
    rope = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [8, 4, 4], "mrope_interleaved": True}
    model = tiny_vision_model("qwen3_vl", rope_parameters=rope, **HEADS)
    del model.config.text_config.rope_parameters[missing]
    with pytest.raises(ModelError, match=rf'add "{missing}": .* to rope_parameters in its config\.json'):
        open_engine(tiny_folder_that_sees(model, tmp_path))


@needs_vllm
@needs_torchvision
def test_images_for_which_no_memory_was_reserved_and_adapters_alone_are_refused(folder, samples):
    without = open_engine(folder, args={"limit_mm_per_prompt": {"image": 0, "video": 0}})
    assert without.generate([asking(samples[1])])
    with pytest.raises(
        ConfigError, match=r"row 0 has images, and rollout\.engine\.args\.limit_mm_per_prompt has image=0"
    ):
        without.generate([asking(samples[0])])
    with pytest.raises(ConfigError, match=r"sync_adapter_only=true: vLLM would leave adapters of the vision tower out"):
        VllmEngine.from_folder(
            folder, VllmRollout(), dtype=torch.float32, max_rows=4, device=CPU, attach_adapter=lambda model: {}
        )


@needs_vllm
def test_without_torchvision_a_model_that_sees_images_is_refused_with_what_to_do(folder, monkeypatch):
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "torchvision" else find(name))
    with pytest.raises(ConfigError, match=r"rollout\.engine=vllm needs torchvision for a model that sees images"):
        open_engine(folder, args=ARGS)
