"""How many logits exist at a time: what fits a CPU's caches, or enough work for each kernel of an accelerator."""

import pytest
import torch

from shardwise.engine.logprobs import CHUNK_ELEMENTS, MAX_ACCELERATOR_ELEMENTS, _chunk_size

VOCAB = 151_936


@pytest.mark.parametrize("num_states", [1, 60, 1000, 8192, 65536])
@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_chunks_stay_within_their_bound(num_states, device):
    chunk = _chunk_size(num_states, VOCAB, torch.device(device))
    bound = CHUNK_ELEMENTS if device == "cpu" else MAX_ACCELERATOR_ELEMENTS
    assert chunk * num_states <= max(bound, 128 * num_states)
    assert chunk == VOCAB or chunk % 128 == 0


def test_an_accelerator_takes_a_16th_of_all_logits_until_that_is_too_much():
    assert _chunk_size(8192, VOCAB, torch.device("cpu")) == 1024
    assert _chunk_size(8192, VOCAB, torch.device("cuda")) == VOCAB // 16 // 128 * 128
    assert _chunk_size(65536, VOCAB, torch.device("cuda")) == MAX_ACCELERATOR_ELEMENTS // 65536


def test_few_states_see_the_whole_vocabulary_at_once():
    assert _chunk_size(0, VOCAB, torch.device("cpu")) == VOCAB
    assert _chunk_size(55, VOCAB, torch.device("cpu")) == VOCAB
