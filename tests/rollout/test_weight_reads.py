import pytest
import torch
from torch import nn

from shardwise.config import TrainingError
from shardwise.region import Region
from shardwise.rollout.weight_reads import TracedWeight, WeightReads

WEIGHT = torch.randn(6, 8, 4)

READERS = {
    "narrow": (lambda w: w.narrow(1, 2, 3), Region.box([(0, 6), (2, 5), (0, 4)])),
    "narrow of narrow": (lambda w: w.narrow(1, 2, 5).narrow(1, 1, 2), Region.box([(0, 6), (3, 5), (0, 4)])),
    "index": (lambda w: w[3], Region.box([(3, 4), (0, 8), (0, 4)])),
    "slices": (lambda w: w[3:5, :, 1], Region.box([(3, 5), (0, 8), (1, 2)])),
    "ellipsis": (lambda w: w[..., 2:], Region.box([(0, 6), (0, 8), (2, 4)])),
    "chunk": (lambda w: torch.chunk(w, 2, dim=1)[1], Region.box([(0, 6), (4, 8), (0, 4)])),
    "split": (lambda w: w.split([3, 5], dim=1)[0], Region.box([(0, 6), (0, 3), (0, 4)])),
    "unbind": (lambda w: w.unbind()[5], Region.box([(5, 6), (0, 8), (0, 4)])),
    "one of a chunk": (
        lambda w: torch.chunk(w, 6)[2].squeeze(0).contiguous()[1:2],
        Region.box([(2, 3), (1, 2), (0, 4)]),
    ),
    "transposed": (lambda w: w.transpose(1, 2).select(0, 1).t()[5], Region.box([(1, 2), (5, 6), (0, 4)])),
    "permuted": (lambda w: w.permute(2, 0, 1)[1:3, 4].clone().data, Region.box([(4, 5), (0, 8), (1, 3)])),
    "turned": (lambda w: w[2].T[:, 3:5], Region.box([(2, 3), (3, 5), (0, 4)])),
    "matrices turned": (lambda w: w.mT[1:3, 2], Region.box([(1, 3), (0, 8), (2, 3)])),
    "copied and seen otherwise": (lambda w: w[1].t().contiguous().view(-1), Region.box([(1, 2), (0, 8), (0, 4)])),
    "cloned and seen otherwise": (lambda w: w.narrow(1, 2, 3).clone().view(-1), Region.box([(0, 6), (2, 5), (0, 4)])),
    "chosen by numbers": (lambda w: w[[0, 2, 5]], Region.whole(WEIGHT.shape)),
    "chosen by a tensor": (lambda w: w[3:, torch.tensor([7, 0])], Region.whole(WEIGHT.shape)),
    "chosen by a tensor of a view": (lambda w: w[3:][torch.tensor([2, 0])], Region.box([(3, 6), (0, 8), (0, 4)])),
    "chosen by a mask": (lambda w: w[torch.tensor([True, False] * 3)], Region.whole(WEIGHT.shape)),
    "of another dtype": (lambda w: w[1].to(torch.float64).float(), Region.box([(1, 2), (0, 8), (0, 4)])),
    "all": (lambda w: w.detach(), Region.whole(WEIGHT.shape)),
    "steps": (lambda w: w[::2], Region.whole(WEIGHT.shape)),
    "another shape": (lambda w: w.view(12, 4, 4)[3], Region.whole(WEIGHT.shape)),
    "a sum": (lambda w: w[1] + w[3], Region((((1, 2), (3, 4)), ((0, 8),), ((0, 4),)))),
    "nothing": (lambda w: w[2:2], Region.box([(0, 0)] * 3)),
}


def copied(view):
    """As loaders do it."""
    parameter = nn.Parameter(torch.full(view.shape, torch.nan))
    parameter.data.copy_(view)
    return parameter.data


@pytest.mark.parametrize("reader", READERS)
def test_what_is_read_is_noted_and_enough_to_read_it_again(reader):
    read, expected = READERS[reader]
    reads = WeightReads("w", WEIGHT.shape, WEIGHT)
    assert torch.equal(copied(read(reads.traced())), read(WEIGHT))
    assert reads.region == expected
    part = WeightReads("w", WEIGHT.shape, expected.of(WEIGHT).clone(), expected)
    assert torch.equal(copied(read(part.traced())), read(WEIGHT))
    assert part.region == expected


def test_what_is_not_there_cannot_be_read():
    held = Region.box([(0, 6), (0, 4), (0, 4)])
    part = WeightReads("layers.0.weight", WEIGHT.shape, held.of(WEIGHT), held)
    message = r"the engine reads other parts of layers\.0\.weight than it did when it was asked"
    with pytest.raises(TrainingError, match=message):
        copied(part.traced()[:, 3:5])
    with pytest.raises(TrainingError, match=message):
        part.traced().sum()


def test_the_form_is_that_of_the_whole_and_no_read():
    reads = WeightReads("w", WEIGHT.shape, WEIGHT.to(torch.bfloat16))
    weight = reads.traced()
    assert isinstance(weight, TracedWeight)
    assert (weight.shape, weight.dtype, weight.device, weight.ndim) == (WEIGHT.shape, torch.bfloat16, WEIGHT.device, 3)
    assert (weight.size(1), weight.dim(), weight.numel(), len(weight), weight.nbytes) == (8, 3, 192, 6, 384)
    assert not weight.is_meta
    assert weight[1].narrow(0, 2, 3).shape == (3, 4)
    assert reads.region.shape.numel() == 0


def test_what_a_loader_writes_is_what_it_reads_afterwards():
    """GPT-OSS's biases, which one rank alone adds."""
    held = Region.box([(2, 4), (0, 8), (0, 4)])
    traced = WeightReads("w", WEIGHT.shape, held.of(WEIGHT).clone(), held).traced()
    part = traced[2:4]
    part[1].zero_()
    assert torch.equal(copied(part), torch.stack([WEIGHT[2], torch.zeros(8, 4)]))
    clone = part.clone()
    clone.mul_(2)
    assert torch.equal(copied(part[0]), WEIGHT[2])


def test_a_number_is_read_as_it_is():
    reads = WeightReads("scale", torch.Size(()), torch.tensor(2.5))
    assert (reads.traced().item(), reads.region) == (2.5, Region(()))


def test_zeros_without_memory_can_be_read():
    zeros = torch.zeros(()).expand(1 << 20, 1 << 20)
    reads = WeightReads("w", zeros.shape, zeros)
    part = reads.traced()[5:7, 3:6]
    assert not copied(part).any()
    assert not copied(part.zero_()).any()
    assert reads.region == Region.box([(5, 7), (3, 6)])
