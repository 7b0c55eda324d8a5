"""Which rank looks at which image of a pack, and where its features belong."""

import math
import random
from itertools import chain

import pytest
import torch

from shardwise.engine.vision import VisionTower, divide_images
from shardwise.families import GridTower
from shardwise.types import ImageRef, Images, TokenBatch

CPU = torch.device("cpu")
IMAGE = 9
TOWER = VisionTower(image_token_id=IMAGE, tower=GridTower(merge_size=2, num_values=3))
GRIDS = [[1, 2, 6], [1, 2, 10]]
"""Two images of 12 and 20 patches, 3 and 5 tokens."""
PIXELS = torch.arange(32 * 3.0).view(32, 3)


def seen(grids, pixels) -> Images:
    sizes = torch.tensor(grids)
    return Images(pixel_values=pixels, num_patches=sizes.prod(1), num_tokens=sizes.prod(1) // 4, sizes=sizes)


def reference(grid) -> ImageRef:
    num_patches = math.prod(grid)
    return ImageRef(name="?", path="?", num_patches=num_patches, num_tokens=num_patches // 4, size=grid)


def batch(grids=GRIDS, *, image_refs=(), pixels=PIXELS) -> TokenBatch:
    return TokenBatch(
        input_ids=torch.zeros(1, dtype=torch.int64),
        position_ids=torch.zeros(1, dtype=torch.int64),
        cu_seqlens=torch.tensor([0, 1], dtype=torch.int32),
        loss_mask=torch.zeros(1, dtype=torch.bool),
        sample_index=[],
        images=seen(grids, pixels) if grids else None,
        image_refs=list(image_refs),
    )


@pytest.mark.parametrize(
    ("num_patches", "num_ranks", "expected"),
    [
        ([4] * 8, 2, [range(4), range(4, 8)]),
        ([4] * 8, 1, [range(8)]),
        ([4, 4], 4, [range(0), range(1), range(1, 1), range(1, 2)]),
        ([100, 1, 1], 2, [range(1), range(1, 3)]),
        ([1, 1, 100], 2, [range(2), range(2, 3)]),
        ([7], 2, [range(0), range(1)]),
        ([], 2, [range(0), range(0)]),
    ],
)
def test_images_are_divided_by_their_patches(num_patches, num_ranks, expected):
    assert divide_images(num_patches, num_ranks) == expected


def test_each_image_has_one_rank_and_no_rank_more_than_an_image_beyond_its_part():
    draw = random.Random(0)
    for _ in range(200):
        sizes, num_ranks = [draw.randint(1, 99) for _ in range(draw.randint(1, 12))], draw.randint(1, 8)
        divided = divide_images(sizes, num_ranks)
        assert list(chain(*divided)) == list(range(len(sizes)))
        most = max(sum(sizes[own.start : own.stop]) for own in divided)
        assert most <= sum(sizes) / num_ranks + max(sizes)


def test_features_go_to_the_ranks_whose_tokens_need_them():
    """The example of ImageShare: the border between two ranks' tokens goes through the second image."""
    first, second = (TOWER.share(batch(), [4, 4], rank=rank, device=CPU) for rank in (0, 1))
    assert (first.sent, first.received) == ([3, 0], [3, 1])
    assert (second.sent, second.received) == ([1, 4], [0, 4])
    assert torch.equal(first.images.pixel_values, PIXELS[:12])
    assert torch.equal(second.images.pixel_values, PIXELS[12:])
    assert [share.images.sizes.tolist() for share in (first, second)] == [GRIDS[:1], GRIDS[1:]]


@pytest.mark.parametrize("num_ranks", [1, 2, 3, 5])
def test_what_ranks_send_is_what_the_others_receive(num_ranks):
    draw = random.Random(num_ranks)
    for _ in range(50):
        grids = [[1, 2, 2 * draw.randint(1, 9)] for _ in range(draw.randint(0, 6))]
        num_patches = [2 * width for _, _, width in grids]
        borders = sorted(draw.randint(0, sum(num_patches) // 4) for _ in range(num_ranks - 1))
        num_tokens = [b - a for a, b in zip([0, *borders], [*borders, sum(num_patches) // 4], strict=True)]
        given = batch(grids, pixels=torch.zeros(sum(num_patches), 3))
        shares = [TOWER.share(given, num_tokens, rank=rank, device=CPU) for rank in range(num_ranks)]
        assert [list(row) for row in zip(*(share.sent for share in shares), strict=True)] == [
            share.received for share in shares
        ]
        assert [sum(share.received) for share in shares] == num_tokens


def test_a_rank_that_has_read_its_own_images_shares_as_with_all_of_them():
    image_refs = [reference(grid) for grid in GRIDS]
    for rank, own in enumerate([slice(0, 12), slice(12, 32)]):
        given = batch([GRIDS[rank]], image_refs=image_refs, pixels=PIXELS[own])
        found, expected = (TOWER.share(one, [4, 4], rank=rank, device=CPU) for one in (given, batch()))
        assert torch.equal(found.images.pixel_values, expected.images.pixel_values)
        assert torch.equal(found.images.sizes, expected.images.sizes)
        assert (found.sent, found.received) == (expected.sent, expected.received)


def test_a_rank_without_an_image_of_its_own_looks_at_a_black_one():
    """Its tokens may need features of another rank's image all the same."""
    image_refs = [reference(GRIDS[0])]
    for given in (batch(GRIDS[:1], pixels=PIXELS[:12]), batch([], image_refs=image_refs)):
        share = TOWER.share(given, [2, 1], rank=0, device=CPU)
        assert torch.equal(share.images.pixel_values, torch.zeros(4, 3))
        assert share.images.sizes.tolist() == [[1, 2, 2]]
        assert (share.sent, share.received) == ([0, 0], [0, 2])
    share = TOWER.share(batch([]), [0, 0], rank=1, device=CPU)
    assert share.images.pixel_values.shape == (4, 3)
    assert (share.sent, share.received) == ([0, 0], [0, 0])


def test_images_that_nobody_has_read_are_an_error():
    image_refs = [reference(grid) for grid in GRIDS]
    with pytest.raises(AssertionError, match="images that nobody has read"):
        TOWER.share(batch([], image_refs=image_refs), [4, 4], rank=1, device=CPU)
