"""How many logits exist at a time: what fits a CPU's caches, or enough work for each kernel of an accelerator; and the
sums over them."""

import pytest
import torch

from shardwise.engine.vocabulary import CHUNK_ELEMENTS, MOST_ON_ACCELERATOR, RunningSoftmax, chunk_size

VOCAB = 151_936


@pytest.mark.parametrize("num_states", [1, 60, 1000, 8192, 65536])
@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_chunks_stay_within_their_bound(num_states, device):
    chunk = chunk_size(num_states, VOCAB, torch.device(device))
    bound = CHUNK_ELEMENTS if device == "cpu" else MOST_ON_ACCELERATOR
    assert chunk * num_states <= max(bound, 128 * num_states)
    assert chunk == VOCAB or chunk % 128 == 0


def test_an_accelerator_takes_a_16th_of_all_logits_until_that_is_too_much():
    assert chunk_size(8192, VOCAB, torch.device("cpu")) == 256
    assert chunk_size(8192, VOCAB, torch.device("cuda")) == VOCAB // 16 // 128 * 128
    assert chunk_size(65536, VOCAB, torch.device("cuda")) == MOST_ON_ACCELERATOR // 65536


def test_few_states_see_the_whole_vocabulary_at_once():
    assert chunk_size(0, VOCAB, torch.device("cpu")) == VOCAB
    assert chunk_size(13, VOCAB, torch.device("cpu")) == VOCAB


def test_what_is_kept_is_computed_of_the_whole_vocabulary_at_once():
    device = torch.device("cpu")
    assert chunk_size(55, VOCAB, device, may_keep=True) == VOCAB > chunk_size(55, VOCAB, device)
    assert chunk_size(56, VOCAB, device, may_keep=True) == chunk_size(56, VOCAB, device)


@pytest.mark.parametrize("width", [1, 7, 40])
def test_softmax_that_arrives_in_chunks_has_the_total_and_the_mean_of_the_whole(width):
    """Logits of a thousand and rows that grow from chunk to chunk: the maximum moves."""
    generator = torch.Generator().manual_seed(0)
    logits = 30 * torch.randn(5, 40, generator=generator) + torch.linspace(-500, 1000, 40)
    logits[1] = logits[1].flip(0)
    values = torch.randn(5, 40, generator=generator)
    softmax = RunningSoftmax(5, torch.device("cpu"))
    for start in range(0, 40, width):
        softmax.add_(logits[:, start : start + width].clone(), values[:, start : start + width])
    expected = (logits.double().softmax(dim=1) * values).sum(dim=1)
    torch.testing.assert_close(softmax.log_total().double(), logits.double().logsumexp(dim=1), rtol=1e-6, atol=0)
    torch.testing.assert_close(softmax.mean().double(), expected, rtol=0, atol=1e-5)
