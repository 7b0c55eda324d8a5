"""Samples with images for the tiny models of tiny_models.py, and what transformers says about them."""

import importlib
import math
import sys
from collections.abc import Sequence
from dataclasses import replace
from typing import Any
from unittest.mock import patch

import torch
from tiny_models import IMAGE, ROW_END, VISION_END, VISION_FAMILIES, VISION_START, families
from torch import Tensor
from transformers.models.llava_next.modeling_llava_next import image_size_to_num_patches

from shardwise.families import finds_positions
from shardwise.types import Denominators, GenerateRequest, Images, Metrics, Sample, TokenBatch, TokenOutputs

NUM_VALUES = 3 * 2 * 4 * 4
"""Of a patch."""
GRIDS = ([(1, 4, 6), (1, 2, 2)], [], [(1, 6, 8)], [])
"""Height and width of the images of each sample, in patches: two of them, none, one, none."""


TILE = {"internvl": 16, "llava": 8, "gemma3": 16, "idefics3": 16, "smolvlm": 16}
"""Pixels of a tile, of 4 tokens, in height and width."""
ANYRES = ("llava_next", "llava_onevision")
"""Families that see a picture in tiles of 8 x 8 pixels as its proportions say."""
MARKED_TILES = ("idefics3", "smolvlm")
"""Families that see a mark before each tile."""


def vision_families(*quick: str, of: Sequence[str] = VISION_FAMILIES) -> list[Any]:
    return families(*quick, of=of)


def vision_sample(model, uid: str, grids: Sequence[tuple[int, int, int]], *, seed: int) -> Sample:
    """Random words around images of random patches; all but image tokens is trained, from the second token on."""
    generator = torch.Generator().manual_seed(seed)

    def words(count: int) -> Tensor:
        return torch.randint(10, 131, (count,), generator=generator)

    parts = [words(3)]
    for grid in grids:
        parts += [torch.tensor([VISION_START, *placeholder(model, grid, len(grids)), VISION_END]), words(2)]
    tokens = torch.cat([*parts, words(4)])
    mask = (torch.arange(len(tokens)) > 1) & (tokens != IMAGE)
    if not grids:
        return Sample(uid=uid, token_ids=tokens, loss_mask=mask)
    images = drawn_images(model, grids, generator)
    positions = None
    if finds_positions(model):
        kinds = (tokens == IMAGE).int()[None]
        positions = model.model.get_rope_index(tokens[None], kinds, image_grid_thw=images.sizes)[0][:, 0]
    return Sample(uid=uid, token_ids=tokens, loss_mask=mask, position_ids=positions, images=images)


def grid_seen(model, grid: tuple[int, int, int]) -> tuple[int, int, int]:
    """The grid of patches in which a model sees an image of `grid`: Mistral 3 sees none of a single token."""
    return (1, 4, 2) if model.config.model_type == "mistral3" and grid == (1, 2, 2) else grid


def pixtral_merges(model) -> int:
    """Patches in a row, and rows, of a token, for a model with Pixtral's tower; 0 for others."""
    is_pixtral = model.config.vision_config.model_type == "pixtral"
    return getattr(model.config, "spatial_merge_size", 1) if is_pixtral else 0


def num_tiles(model, grid: tuple[int, int, int]) -> int:
    """LLaVA's and Gemma 3's is one; the others' are of 4 x 4 patches."""
    return 1 if model.config.model_type in ("llava", "gemma3") else max(1, grid[1] * grid[2] // 16)


def placeholder(model, grid: tuple[int, int, int], num_images: int) -> list[int]:
    """The tokens between the marks of an image of such a grid of patches, one of several in its sample."""
    _, height, width = grid_seen(model, grid)
    if merge_size := pixtral_merges(model):
        return [*[IMAGE] * (width // merge_size), ROW_END] * (height // merge_size)
    if model.config.model_type in ANYRES:
        return [IMAGE] * int(drawn_images(model, [grid] * num_images, torch.Generator()).num_tokens[0])
    if model.config.model_type in MARKED_TILES:
        return [ROW_END, *[IMAGE] * 4] * num_tiles(model, grid)
    if model.config.model_type == "lfm2_vl":
        return [token for shape in tiles_of(grid) for token in (ROW_END, *[IMAGE] * (math.prod(shape) // 4))]
    if model.config.model_type in TILE:
        return [IMAGE] * 4 * num_tiles(model, grid)
    return [IMAGE] * (height * width // 4)


def drawn_images(model, grids: Sequence[tuple[int, int, int]], generator: torch.Generator) -> Images:
    """Of random pixels."""
    sizes = torch.tensor([grid_seen(model, grid) for grid in grids])
    num_patches = sizes.prod(1)
    if merge_size := pixtral_merges(model):
        pixels = torch.randn(int(num_patches.sum()), 3 * 4 * 4, generator=generator)
        num_tokens = num_patches // merge_size**2
        return Images(pixel_values=pixels, num_patches=num_patches, num_tokens=num_tokens, sizes=4 * sizes[:, 1:])
    if model.config.model_type == "gemma4":
        pixels = torch.rand(int(num_patches.sum()), 3 * 4 * 4, generator=generator)
        return Images(pixel_values=pixels, num_patches=num_patches, num_tokens=num_patches // 4, sizes=4 * sizes[:, 1:])
    if model.config.model_type in ANYRES:
        return images_in_tiles(model, 4 * sizes[:, 1:], generator)
    if model.config.model_type == "lfm2_vl":
        pixels = torch.randn(int(num_patches.sum()), 3 * 4 * 4, generator=generator)
        cut = torch.tensor([[1, len(tiles_of(grid)) - 1 or 1, 4, *tiles_of(grid)[-1]] for grid in grids])
        return Images(pixel_values=pixels, num_patches=num_patches, num_tokens=num_patches // 4, sizes=cut)
    if side := TILE.get(model.config.model_type):
        tiles = torch.tensor([num_tiles(model, grid) for grid in grids])
        pixels = torch.randn(int(tiles.sum()), 3, side, side, generator=generator)
        return Images(pixel_values=pixels, num_patches=tiles, num_tokens=4 * tiles, sizes=4 * sizes[:, 1:])
    pixels = torch.randn(int(num_patches.sum()), NUM_VALUES, generator=generator)
    return Images(pixel_values=pixels, num_patches=num_patches, num_tokens=num_patches // 4, sizes=sizes)


def vision_samples(model, grids=GRIDS) -> list[Sample]:
    return [vision_sample(model, str(index), own, seed=index) for index, own in enumerate(grids)]


def reference_logits(model, sample: Sample) -> Tensor:
    """[L, V] of one sample alone by transformers' own forward, which finds positions itself; of a score head [1]."""
    seen = transformers_inputs(model, sample)
    logits: Tensor = model(input_ids=sample.token_ids[None], use_cache=False, **seen).logits[0]
    return logits


def tiles_of(grid: tuple[int, int, int]) -> list[tuple[int, int]]:
    """Height and width in patches of LFM2-VL's tiles of an image: of a large one two squares, and the whole picture."""
    return [(4, 4)] * 3 if grid == (1, 6, 8) else [grid[1:]]


def images_in_tiles(model, sizes: Tensor, generator: torch.Generator) -> Images:
    """As LLaVA-NeXT and LLaVA-OneVision read them; how many tokens they are, says the model."""
    pinpoints, counted = model.config.image_grid_pinpoints, several(model, len(sizes))
    is_cut = not counted or len(sizes) == 1
    tiles = torch.tensor([image_size_to_num_patches(size, pinpoints, 8) if is_cut else 1 for size in sizes.tolist()])
    pixels = torch.randn(int(tiles.sum()), 3, 8, 8, generator=generator)
    dtype = next(model.parameters()).dtype
    with torch.no_grad():
        features = model.model.get_image_features(pixels.to(dtype), sizes, **counted, return_dict=True).pooler_output
    return Images(pixel_values=pixels, num_patches=tiles, num_tokens=torch.tensor([*map(len, features)]), sizes=sizes)


def several(model, num_images: int) -> dict[str, Tensor]:
    """What LLaVA-OneVision is told beside the images of a sample, for it looks at one more closely than at several."""
    return {"batch_num_images": torch.tensor([num_images])} if model.config.model_type == "llava_onevision" else {}


def transformers_inputs(model, sample: Sample) -> dict[str, Tensor]:
    """What transformers' forward and generate are given beside the tokens, as the family's processor writes it."""
    model.base_model.rope_deltas = None
    if sample.images is None:
        return {}
    if pixtral_merges(model):
        return {"pixel_values": padded(sample.images), "image_sizes": sample.images.sizes}
    if model.config.model_type in ANYRES:
        parts = sample.images.pixel_values.split(sample.images.num_patches.tolist())
        pixels = torch.nn.utils.rnn.pad_sequence(parts, batch_first=True)
        counted = several(model, len(sample.images.sizes))
        return {"pixel_values": pixels, "image_sizes": sample.images.sizes} | counted
    if model.config.model_type in MARKED_TILES:
        return {"pixel_values": sample.images.pixel_values[None]}
    if model.config.model_type == "lfm2_vl":
        return padded_tiles(sample.images)
    kinds = (sample.token_ids == model.config.image_token_id).int()[None]
    if model.config.model_type == "gemma4":
        return padded_patches(sample.images) | {"mm_token_type_ids": kinds}
    if model.config.model_type in TILE:
        seen = {"pixel_values": sample.images.pixel_values}
        return seen | ({"token_type_ids": kinds} if model.config.model_type == "gemma3" else {})
    seen = {"pixel_values": sample.images.pixel_values, "image_grid_thw": sample.images.sizes}
    return seen | ({"mm_token_type_ids": kinds} if finds_positions(model) else {})


def padded_tiles(images: Images) -> dict[str, Tensor]:
    """Of LFM2-VL, every tile padded to 64 patches."""
    shapes = []
    for (rows, columns, side, *whole), num_patches in zip(images.sizes.tolist(), images.num_patches, strict=True):
        squares = [[side, side]] * (rows * columns) if rows * columns > 1 else []
        shapes += [*squares, whole] if num_patches > len(squares) * side**2 else squares
    pixels, mask, patches = (
        torch.zeros(len(shapes), 64, 48),
        torch.zeros(len(shapes), 64).int(),
        iter(images.pixel_values),
    )
    for tile, (height, width) in enumerate(shapes):
        mask[tile, : height * width] = 1
        for place in range(height * width):
            pixels[tile, place] = next(patches)
    pixels = pixels.to(images.pixel_values.dtype)
    return {"pixel_values": pixels, "spatial_shapes": torch.tensor(shapes), "pixel_attention_mask": mask}


def padded(images: Images) -> Tensor:
    """[I, 3, H, W], of patches of 3 x 4 x 4 values."""
    height, width = images.sizes.max(0).values.tolist()
    pictures = torch.zeros(len(images.sizes), 3, height, width, dtype=images.pixel_values.dtype)
    patches = iter(images.pixel_values)
    for picture, (own_height, own_width) in zip(pictures, images.sizes.tolist(), strict=True):
        for top in range(0, own_height, 4):
            for left in range(0, own_width, 4):
                picture[:, top : top + 4, left : left + 4] = next(patches).view(3, 4, 4)
    return pictures


def padded_patches(images: Images) -> dict[str, Tensor]:
    """As Gemma 4's processor gives them: every image padded to the most patches that one may have, here 280."""
    patches = torch.zeros(len(images.sizes), 280, images.pixel_values.shape[1], dtype=images.pixel_values.dtype)
    places = torch.full((len(images.sizes), 280, 2), -1)
    given = iter(images.pixel_values)
    for image, (height, width) in enumerate((images.sizes // 4).tolist()):
        for place in range(height * width):
            patches[image, place] = next(given)
            places[image, place] = torch.tensor([place % width, place // width])
    return {"pixel_values": patches, "image_position_ids": places}


def pixtral_processor(image_processor, tokenizer, **options):
    """transformers', which imports torchvision for a function that the module of its PIL backend has too."""
    package = "transformers.models.pixtral"
    pil = importlib.import_module(f"{package}.image_processing_pil_pixtral")
    with patch.dict(sys.modules, {f"{package}.image_processing_pixtral": pil}):
        kind = importlib.import_module(f"{package}.processing_pixtral").PixtralProcessor
    return kind(image_processor, tokenizer, **options)


def reference_logprobs(model, sample: Sample) -> Tensor:
    """[L] of one sample alone; 0 where not trained."""
    scores = reference_logits(model, sample)[:-1].log_softmax(-1)
    logprobs = scores.gather(1, sample.token_ids[1:, None])[:, 0]
    return torch.cat([logprobs.new_zeros(1), logprobs]) * sample.loss_mask


def request_of(sample: Sample, **options) -> GenerateRequest:
    """For completions of it."""
    return GenerateRequest(uid=sample.uid, prompt_ids=sample.token_ids.tolist(), images=sample.images, **options)


@torch.no_grad()
def assert_scores_of(model, samples: Sequence[Sample], found: Sequence[Sequence[float]], *, atol: float) -> None:
    """Whether they are the policy's logprobs of every word after the first."""
    for sample, logprobs in zip(samples, found, strict=True):
        everything = replace(sample, loss_mask=torch.arange(len(sample.token_ids)) > 0)
        expected, words = reference_logprobs(model, everything)[1:], sample.token_ids[1:] != IMAGE
        torch.testing.assert_close(torch.tensor(logprobs)[words], expected[words], atol=atol, rtol=0)


def negative_logprob(outputs: TokenOutputs, batch: TokenBatch, denominators: Denominators) -> tuple[Tensor, Metrics]:
    assert outputs.logprobs is not None
    return -outputs.logprobs[batch.loss_mask].sum() / denominators.num_tokens, {}


def reference_gradients(model, samples: Sequence[Sample]) -> dict[str, Tensor]:
    """Of the mean over the trained tokens, each sample alone."""
    model.zero_grad()
    num_tokens = sum(int(sample.loss_mask.sum()) for sample in samples)
    for sample in samples:
        (-reference_logprobs(model, sample).sum() / num_tokens).backward()
    return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
