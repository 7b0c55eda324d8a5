import torch

from shardwise.ops import HostCopies

CPU = torch.device("cpu")


def test_storages_are_empty_while_away_and_hold_the_same_bits_afterwards():
    tensors = [torch.randn(3, 5), torch.arange(7), torch.tensor(float("nan")), torch.randn(2).bfloat16()]
    originals = [tensor.clone() for tensor in tensors]
    pointers = [id(tensor) for tensor in tensors]
    copies = HostCopies()
    assert not copies
    copies.take(tensors)
    assert copies
    assert [tensor.untyped_storage().nbytes() for tensor in tensors] == [0] * 4
    assert [tensor.shape for tensor in tensors] == [original.shape for original in originals]
    copies.give_back()
    assert not copies
    assert [id(tensor) for tensor in tensors] == pointers
    for tensor, original in zip(tensors, originals, strict=True):
        torch.testing.assert_close(tensor, original, rtol=0, atol=0, equal_nan=True)


def test_views_of_one_storage_share_one_copy():
    base = torch.arange(12.0)
    views = [base[:5], base.view(3, 4).t(), base[8:]]
    copies = HostCopies()
    copies.take([*views, base])
    assert sum(host.nbytes for _, host in copies._copies.values()) == base.nbytes
    assert base.untyped_storage().nbytes() == 0
    copies.give_back()
    assert base.tolist() == list(range(12))
    views[0].fill_(-1)
    assert base[:6].tolist() == [-1, -1, -1, -1, -1, 5]


def test_taking_or_giving_back_twice_changes_nothing():
    first, second = torch.arange(4.0), torch.arange(3)
    copies = HostCopies()
    copies.give_back()
    copies.take([first])
    copies.take([first, second])  # the first is away already
    assert first.untyped_storage().nbytes() == second.untyped_storage().nbytes() == 0
    copies.give_back()
    copies.give_back()
    assert (first.tolist(), second.tolist()) == ([0, 1, 2, 3], [0, 1, 2])
    copies.take([first])
    copies.give_back()
    assert first.tolist() == [0, 1, 2, 3]


def test_empty_tensor_and_no_tensor_are_nothing_to_take():
    copies = HostCopies()
    copies.take([torch.zeros(0), torch.zeros(3, 0)])
    copies.take([])
    assert not copies
    copies.give_back()


def test_trap_27_offload_that_returns_to_the_wrong_device():
    """Trap 27: the storage itself is filled again, so there is no other device to return to. Where there is one,
    tests/gpu/test_gpu_offload.py looks."""
    tensor = torch.arange(5.0)
    storage = tensor.untyped_storage()
    copies = HostCopies()
    copies.take([tensor])
    copies.give_back()
    assert tensor.untyped_storage()._cdata == storage._cdata
    assert (tensor.device, storage.device, storage.nbytes()) == (CPU, CPU, 20)
