"""Training on images is training of transformers' model, on every layout: packed, sharded, shared between ranks."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from family_table import FAMILIES, random_model
from safetensors.torch import load_file
from tiny_models import VISION_FAMILIES, tiny_vision_model
from vision_samples import (
    GRIDS,
    negative_logprob,
    reference_gradients,
    reference_logits,
    reference_logprobs,
    vision_families,
    vision_samples,
)

from shardwise.config import ConfigError, EngineConfig, LoraConfig, ModulePrecisionConfig, OptimizerConfig
from shardwise.data.packing import pack, unpack
from shardwise.data.synthetic import train_tokenizer
from shardwise.engine import TrainEngine
from shardwise.engine.model_classes import AUTO_CLASSES
from shardwise.families import takes_images, tower_of, vision_paths
from shardwise.ops import plain_name

CPU = torch.device("cpu")
TOWER = "model.visual"
BLOCKS = {
    "mistral3": ("model.vision_tower.transformer.layers", torch.bfloat16),
    "pixtral": ("model.vision_tower.transformer.layers", torch.bfloat16),
    "internvl": ("model.vision_tower.encoder.layer", None),
    "llava": ("model.vision_tower.encoder.layers", None),
    "llava_next": ("model.vision_tower.encoder.layers", None),
    "gemma3": ("model.vision_tower.encoder.layers", None),
    "gemma4": ("model.vision_tower.encoder.layers", torch.bfloat16),
    "llava_onevision": ("model.vision_tower.encoder.layers", None),
    "lfm2_vl": ("model.vision_tower.encoder.layers", None),
    "idefics3": ("model.vision_model.encoder.layers", None),
    "smolvlm": ("model.vision_model.encoder.layers", None),
}
"""Path of a tower's blocks and the dtype of the angles by which they rotate, if not as with Qwen and GLM."""


SHARED_KEYS = {
    "num_hidden_layers": 4,
    "num_kv_shared_layers": 2,
    "layer_types": ["sliding_attention", "full_attention"] * 2,
    "per_layer_config": {"1": {"head_dim": 16}, "3": {"head_dim": 16}},
}


@pytest.fixture(scope="module", params=vision_families("qwen3_vl", "mistral3"))
def family(request):
    return request.param


@pytest.fixture
def tower(family):
    """Its path."""
    return vision_paths(tiny_vision_model(family))[0]


@pytest.fixture
def shared(family):
    """For tests in which ranks share sequences."""
    if family in ("qwen3_5", "qwen3_5_moe", "lfm2_vl"):
        pytest.skip("its linear attention, or short convolution, carries a state from token to token: refused by name")


@pytest.fixture(scope="module")
def folder(family, tmp_path_factory):
    path = tmp_path_factory.mktemp(family)
    tiny_vision_model(family).save_pretrained(path)
    return str(path)


def test_every_family_that_is_shown_images_is_proven_here():
    """Others have methods of the same names: what is added to the table of families is proven here, or refused."""
    seeing = {name: options for name, options in FAMILIES.items() if "vision_config" in options}
    assert {name for name, options in seeing.items() if takes_images(random_model(name, options))} == {
        tiny_vision_model(name).config.model_type for name in VISION_FAMILIES
    }


def build(folder: str, **keys) -> TrainEngine:
    optimizer = OptimizerConfig(learning_rate=1e-2, adam_eps=1e-3)
    return TrainEngine.build(Path(folder), EngineConfig(**keys), device=CPU, optimizer=optimizer)


def step(folder: str, samples, max_tokens: int, keys: dict):
    """Logprobs by sample, gradients by name, weights after the step; the same on every rank."""
    engine = build(folder, **keys)
    num_sharing = keys.get("ulysses_size", 1)
    packed = pack(samples, num_shards=dist.get_world_size() // num_sharing, max_tokens=max_tokens)
    batches = packed.shards[dist.get_rank() // num_sharing]
    shards = [None] * dist.get_world_size()
    dist.all_gather_object(shards, [out.logprobs for out in engine.forward(batches)])
    engine.forward_backward(batches, negative_logprob, packed.denominators)
    named = {plain_name(name): parameter for name, parameter in engine._model.hf_model.named_parameters()}
    gradients = {name: p.grad.full_tensor().clone() for name, p in named.items() if p.grad is not None}
    engine.optim_step()
    weights = {name: tensor.clone() for name, tensor in engine.named_weights(torch.float32)}
    has_images = [batch.images is not None for batch in batches]
    return unpack(packed, shards[::num_sharing]), gradients, weights, has_images


def assert_same_step(found, expected):
    largest = max(float(gradient.abs().max()) for gradient in expected[1].values())
    torch.testing.assert_close(found[0], expected[0], atol=1e-5, rtol=0)
    torch.testing.assert_close(found[1], expected[1], atol=1e-5 * largest, rtol=1e-4)
    torch.testing.assert_close(found[2], expected[2], atol=2e-5, rtol=0)


@pytest.mark.parametrize(
    "family", vision_families("qwen3_vl", "qwen2_5_vl", "glm4v", "mistral3", "gemma3", "gemma4"), indirect=True
)
def test_traps_06_and_10_packed_samples_with_images_are_each_what_they_are_alone(run_ranks, family, folder):
    """Positions and deep-stack features too: one pack holds two images, none, one and none; transformers computes each
    sample by itself."""
    model = tiny_vision_model(family)
    samples = vision_samples(model)
    ((logprobs, gradients, _, has_images),) = run_ranks(step, 1, folder, samples, 256, {})
    assert has_images == [True]
    with torch.no_grad():
        torch.testing.assert_close(logprobs, [reference_logprobs(model, s) for s in samples], atol=1e-5, rtol=0)
    expected = reference_gradients(model, samples)
    torch.testing.assert_close(gradients, expected, atol=1e-5, rtol=1e-4)
    assert all(any(name.startswith(path) for name in gradients) for path in vision_paths(model))


@pytest.mark.parametrize(
    ("family", "settings"),
    [
        *(("gemma3", {"sliding_window": window}) for window in (1, 2, 5, 64)),
        *(("gemma4", {"sliding_window": window}) for window in (2, 64)),
        ("gemma4", {"use_bidirectional_attention": None}),
        ("gemma4", SHARED_KEYS),
    ],
)
def test_a_window_cuts_what_the_tokens_of_an_image_see(run_ranks, tmp_path, family, settings):
    """Before a token of an image, not behind it; an image has 4, or 1, 6 and 12. In small models of Gemma 4 they see
    what is before them, and some layers have the keys of others."""
    model = tiny_vision_model(family, **settings)
    model.save_pretrained(tmp_path)
    samples = vision_samples(model)
    ((logprobs, gradients, *_),) = run_ranks(step, 1, str(tmp_path), samples, 256, {})
    with torch.no_grad():
        torch.testing.assert_close(logprobs, [reference_logprobs(model, s) for s in samples], atol=1e-5, rtol=0)
    torch.testing.assert_close(gradients, reference_gradients(model, samples), atol=1e-5, rtol=1e-4)


def test_trap_10_ranks_without_an_image_keep_in_step_with_those_that_have_one(run_ranks, family, folder):
    """The tower's units gather and reduce on every rank, in every micro-batch."""
    samples = vision_samples(tiny_vision_model(family), [GRIDS[0], [], [], []])
    (alone,) = run_ranks(step, 1, folder, samples, 256, {})
    ranks = run_ranks(step, 2, folder, samples, longest(samples), {})
    assert [flags for *_, flags in ranks] == [[True], [False]]
    for found in ranks:
        assert_same_step(found, alone)


@pytest.mark.parametrize("family", vision_families("qwen3_vl", "mistral3", "gemma3"), indirect=True)
@pytest.mark.usefixtures("shared")
def test_trap_10_ranks_that_share_a_pack_take_the_features_of_their_own_tokens(run_ranks, family, folder):
    """With Ulysses the border between two ranks goes through an image, and deep-stack features part with it.
    The pack has an odd number of tokens."""
    samples = vision_samples(tiny_vision_model(family))
    *others, last = samples
    if sum(len(sample.token_ids) for sample in samples) % 2 == 0:
        samples = [*others, replace(last, token_ids=last.token_ids[:-1], loss_mask=last.loss_mask[:-1])]
    (alone,) = run_ranks(step, 1, folder, samples, 256, {})
    for found in run_ranks(step, 2, folder, samples, 256, {"ulysses_size": 2}):
        assert_same_step(found, alone)


def longest(samples) -> int:
    """Tokens of a pack that has room for every sample and one more token."""
    return max(len(sample.token_ids) for sample in samples) + 1


def shares(folder: str, samples, max_tokens: int):
    """How many patches the tower of this rank is given in each micro-batch."""
    engine, found = build(folder, ulysses_size=2), []

    def count(module, args, kwargs):
        (pixels,), sizes = args or (kwargs["pixel_values"],), kwargs.get("image_sizes")
        if (places := kwargs.get("pixel_position_ids")) is not None:
            pixels = places[(places >= 0).all(-1)]
        found.append(len(pixels) if sizes is None else sum(height * width // 16 for height, width in sizes))

    tower = engine._model.hf_model.get_submodule(vision_paths(engine._model.hf_model)[0])
    tower.register_forward_pre_hook(count, with_kwargs=True)
    engine.forward(pack(samples, num_shards=1, max_tokens=max_tokens).shards[0])
    return found


@pytest.mark.usefixtures("shared")
def test_ranks_that_share_a_pack_divide_its_images(run_ranks, family, folder):
    """Of images of 48, 24 and 4 patches one rank looks at the first, the other at two; of a single one nothing is left
    for one of them, and of none for both: they look at a black image of 4. Mistral 3's smallest are of 8, and InternVL,
    Idefics 3 and SmolVLM have a tile for 16, at least one; LLaVA and Gemma 3 have one, LLaVA-NeXT of these three 5, 5
    and 3, and LLaVA-OneVision 5 of the first and one of two that stand together."""
    model = tiny_vision_model(family)
    black = int(tower_of(model.config).black().num_patches)
    numbers = {"mistral3": (32, 48), "llava_next": (5, 8), "llava_onevision": (2, 5)}
    numbers |= dict.fromkeys(("internvl", "idefics3", "smolvlm"), (2, 3)) | dict.fromkeys(("llava", "gemma3"), (1, 2))
    rest, largest = numbers.get(family, (28, 48))
    assert sorted(run_ranks(shares, 2, folder, vision_samples(model), 256)) == [[rest], [largest]]
    alone = {"llava": 1, "llava_next": 5, "gemma3": 1}.get(family, largest)
    assert run_ranks(shares, 2, folder, vision_samples(model, [[(1, 6, 8)]]), 256) == [[black], [alone]]
    assert run_ranks(shares, 2, folder, vision_samples(model, [[], []]), 256) == [[black], [black]]


@pytest.mark.parametrize(
    ("grids", "is_one_pack"),
    [
        pytest.param([[(1, 6, 8)], []], True, id="one image"),
        pytest.param([[], []], True, id="no image"),
        pytest.param([*GRIDS, []], False, id="micro-batches with and without images"),
    ],
)
@pytest.mark.usefixtures("shared")
def test_packs_with_few_images_give_what_one_rank_gives(run_ranks, folder, family, grids, is_one_pack):
    """A rank that looks at nobody's image computes tokens of another's, and the tower's units keep in step."""
    samples = vision_samples(tiny_vision_model(family), grids)
    max_tokens = 256 if is_one_pack else longest(samples)
    (alone,) = run_ranks(step, 1, folder, samples, 256, {})
    for found in run_ranks(step, 2, folder, samples, max_tokens, {"ulysses_size": 2}):
        assert_same_step(found, alone)


@pytest.mark.parametrize(
    "keys",
    [
        pytest.param({"freeze_module_prefix": [TOWER]}, id="frozen tower", marks=pytest.mark.full),
        pytest.param({"activation_checkpointing": "full", "reduce_gradients": "last_micro_batch"}, id="checkpointing"),
        pytest.param({"lora": LoraConfig(rank=4)}, id="adapters on the tower"),
        pytest.param({"lora": LoraConfig(rank=4, quantize_base="nf4")}, id="4 bits", marks=pytest.mark.full),
    ],
)
def test_divided_images_go_with_other_options(run_ranks, tmp_path, keys):
    """Two groups of two ranks, with images of their own."""
    model = tiny_vision_model("qwen3_vl")
    model.save_pretrained(tmp_path)
    samples = vision_samples(model, [*GRIDS, *GRIDS[:1]])
    (alone,) = run_ranks(step, 1, str(tmp_path), samples, 256, keys)
    assert any(name.startswith(TOWER) for name in alone[1]) == ("freeze_module_prefix" not in keys)
    for found in run_ranks(step, 4, str(tmp_path), samples, 40, keys | {"ulysses_size": 2}):
        assert_same_step(found, alone)


def test_trap_10_a_frozen_tower_stays_as_it_is_and_the_rest_learns_alike(run_ranks, folder, family, tower):
    samples = vision_samples(tiny_vision_model(family))
    (alone,) = run_ranks(step, 1, folder, samples, 256, {})
    ranks = run_ranks(step, 2, folder, samples, longest(samples), {"freeze_module_prefix": [tower]})
    before = tiny_vision_model(family).state_dict()
    for _, gradients, weights, _ in ranks:
        assert gradients.keys() == {name for name in alone[1] if not name.startswith(tower)}
        torch.testing.assert_close(gradients, {name: alone[1][name] for name in gradients}, atol=1e-5, rtol=1e-4)
        frozen = [name for name in weights if name.startswith(tower)]
        assert frozen
        assert all(torch.equal(weights[name], before[name]) for name in frozen)


@pytest.mark.parametrize(
    ("keys", "is_frozen"),
    [
        ({"activation_checkpointing": "full", "reduce_gradients": "last_micro_batch"}, True),
        ({"activation_checkpointing": "selective", "apply_tiled_mlp": True, "reshard_after_forward": False}, False),
    ],
)
def test_options_of_memory_change_no_number(run_ranks, family, folder, tower, keys, is_frozen):
    keys = keys | {"freeze_module_prefix": [tower] if is_frozen else []}
    samples = vision_samples(tiny_vision_model(family))
    (alone,) = run_ranks(step, 1, folder, samples, 256, {})
    for logprobs, gradients, _, has_images in run_ranks(step, 2, folder, samples, longest(samples), keys):
        assert len(has_images) == (1 if family == "pixtral" else 2)  # whose words fit beside its shorter image
        torch.testing.assert_close(logprobs, alone[0], atol=1e-5, rtol=0)
        torch.testing.assert_close(gradients, {name: alone[1][name] for name in gradients}, atol=1e-5, rtol=1e-4)


def headed_step(folder: str, out: str, samples, head: str):
    """Values by sample after a step, which is exported."""
    optimizer = OptimizerConfig(learning_rate=1e-2)
    engine = TrainEngine.build(Path(folder), EngineConfig(), device=CPU, optimizer=optimizer, head=head)
    packed = pack(samples, num_shards=dist.get_world_size(), max_tokens=128)
    batches = packed.shards[dist.get_rank()]
    engine.forward_backward(batches, negative_value, packed.denominators)
    engine.optim_step()
    engine.export_hf(Path(out), train_tokenizer(["2+3=5"], vocab_size=261))
    shards = [None] * dist.get_world_size()
    dist.all_gather_object(shards, [found.values for found in engine.forward(batches)])
    return unpack(packed, shards)


def negative_value(outputs, batch, denominators):
    return -outputs.values.sum() / denominators.num_sequences, {}


@pytest.mark.parametrize("head", AUTO_CLASSES)
def test_critics_and_reward_models_see_images_as_their_exported_class_does(run_ranks, tmp_path, family, folder, head):
    """Of Qwen 3.5 it is transformers' own; of the others its code is beside the weights."""
    samples = vision_samples(tiny_vision_model(family))
    found, _ = run_ranks(headed_step, 2, folder, str(tmp_path / "out"), samples, head)
    model = AUTO_CLASSES[head].from_pretrained(tmp_path / "out", trust_remote_code=True, attn_implementation="eager")
    for values, sample in zip(found, samples, strict=True):
        with torch.no_grad():
            logits = reference_logits(model.eval(), sample)
        own = values[-1:] if head == "sequence_scores" else values[1:][sample.loss_mask[1:]]
        expected = logits if head == "sequence_scores" else logits[:-1, 0][sample.loss_mask[1:]]
        assert expected.abs().max() > 0.01
        torch.testing.assert_close(own, expected, atol=1e-5, rtol=1e-4)


def test_trap_10_a_prefix_without_a_tower_behind_it_is_refused(run_ranks, folder, tower):
    """Elsewhere it trains the tower silently."""
    without = tower.removeprefix("model.")
    (reason,) = run_ranks(refusal, 1, folder, {"freeze_module_prefix": [without]})
    assert f"{without!r} names no module" in reason
    assert tower in reason


def refusal(folder: str, keys: dict) -> str:
    try:
        build(folder, **keys)
    except ConfigError as error:
        return str(error)
    return ""


def test_the_tower_is_sharded_by_itself_and_given_its_inputs_as_they_are(run_ranks, family, folder, tower):
    """Blocks of most rotate by float32 angles, which in bfloat16 would be other angles."""
    blocks, angles = BLOCKS.get(family, (f"{TOWER}.blocks", torch.float32))
    samples = vision_samples(tiny_vision_model(family), GRIDS[:1])
    as_they_are = {"module_precision": [ModulePrecisionConfig(module=tower, cast_forward_inputs=False)]}
    for keys in ({}, *([] if tower_of(tiny_vision_model(family).config).follows_first_parameter else [as_they_are])):
        (found,) = run_ranks(seen_by_a_block, 1, folder, {"param_dtype": "bfloat16"} | keys, samples, f"{blocks}.0")
        assert found == (torch.bfloat16, angles, torch.bfloat16, [tower, f"{blocks}.0"])


def seen_by_a_block(folder: str, keys: dict, samples, path: str):
    """The dtypes of hidden states, angles and weights in its attention, and the names of the first two units."""
    engine = build(folder, **keys)
    found = []

    def look(module, args, kwargs):
        angles = kwargs.get("position_embeddings")
        found.extend([None if angles is None else angles[0].dtype, next(module.parameters()).dtype])

    block = engine._model.hf_model.get_submodule(path)
    attention = next(part for name, part in block.named_children() if name in ("attn", "attention", "self_attn"))
    block.register_forward_pre_hook(lambda module, args: found.append(args[0].dtype))
    attention.register_forward_pre_hook(look, with_kwargs=True)
    engine.forward(pack(samples, num_shards=1, max_tokens=256).shards[0])
    paths = {id(module): path for path, module in engine._model.hf_model.named_modules()}
    units = [paths[id(unit)] for unit in engine._units if id(unit) in paths]
    return *found, units[:2]


def test_an_export_is_that_of_save_pretrained_with_the_processors_files(run_ranks, folder, tmp_path):
    (Path(folder) / "preprocessor_config.json").write_text('{"patch_size": 4}')
    run_ranks(export, 2, folder, str(tmp_path / "out"))
    saved, written = load_file(Path(folder) / "model.safetensors"), load_file(tmp_path / "out" / "model.safetensors")
    assert saved.keys() == written.keys()
    assert all(torch.equal(tensor, written[name]) for name, tensor in saved.items())
    assert (tmp_path / "out" / "preprocessor_config.json").read_text() == '{"patch_size": 4}'
    from transformers import AutoModelForImageTextToText

    reloaded = AutoModelForImageTextToText.from_pretrained(tmp_path / "out")
    assert all(torch.equal(tensor, saved[name]) for name, tensor in reloaded.state_dict().items() if name in saved)


def export(folder: str, out: str) -> None:
    build(folder).export_hf(Path(out), train_tokenizer(["2+3=5"], vocab_size=261))


@pytest.mark.parametrize("family", vision_families("qwen3_vl"), indirect=True)
@pytest.mark.parametrize("is_frozen", [False, True])
def test_an_adapter_on_all_linear_layers_adapts_the_tower_too_unless_it_is_frozen(
    run_ranks, tmp_path, family, folder, tower, is_frozen
):
    """As peft means it; a prefix keeps to the language model, also where layers of both have one name (gate_proj of
    Qwen2.5-VL and GLM). peft loads what is written."""
    tiny = tiny_vision_model(family)
    samples = vision_samples(tiny)
    language_model = next(path for path, part in tiny.named_modules() if part is tiny.get_decoder())
    prefixes = [tower] if is_frozen else []
    (found,) = run_ranks(adapt, 1, folder, samples, str(tmp_path / "adapter"), prefixes)
    logprobs, off, base, names = found
    # SigLIP's features lie transposed: torch multiplies them in another order by a weight that is frozen.
    torch.testing.assert_close(off, base, atol=1e-5 if family == "llava_onevision" else 0, rtol=0)
    assert any(f".{tower}." in name for name in names) == (not is_frozen)
    assert any(f".{language_model}." in name for name in names)
    from peft import PeftModel
    from transformers import AutoModelForImageTextToText

    model = AutoModelForImageTextToText.from_pretrained(folder, attn_implementation="eager")
    model = PeftModel.from_pretrained(model, tmp_path / "adapter").eval()
    with torch.no_grad():
        expected = [reference_logprobs(model.base_model.model, sample) for sample in samples]
    torch.testing.assert_close(logprobs, expected, atol=1e-4, rtol=0)


def adapt(folder: str, samples, out: str, prefixes: list[str]):
    packed = pack(samples, num_shards=1, max_tokens=256)

    def logprobs(engine, **options):
        return unpack(packed, [[found.logprobs for found in engine.forward(packed.shards[0], **options)]])

    base = logprobs(build(folder))
    engine = build(folder, lora=LoraConfig(rank=4), freeze_module_prefix=prefixes)
    engine.forward_backward(packed.shards[0], negative_logprob, packed.denominators)
    engine.optim_step()
    engine.export_adapter(Path(out), folder)
    return (
        logprobs(engine),
        logprobs(engine, with_adapters=False),
        base,
        list(load_file(Path(out) / "adapter_model.safetensors")),
    )
