from dataclasses import replace

import pytest
import torch
import torch.distributed as dist
from tiny_models import random_samples

from shardwise.data.packing import pack
from shardwise.engine.token_slice import ScoredTokens, TokenSlice
from shardwise.engine.ulysses import Ulysses
from shardwise.engine.vision import VisionTower
from shardwise.families import GridTower
from shardwise.types import Images, TokenBatch

CPU = torch.device("cpu")
BATCH = TokenBatch(
    input_ids=torch.tensor([5, 9, 2, 4, 8]),
    position_ids=torch.tensor([0, 1, 2, 0, 1]),
    cu_seqlens=torch.tensor([0, 3, 5], dtype=torch.int32),
    loss_mask=torch.tensor([False, False, True, False, True]),
    sample_index=[0, 1],
)


class Place:
    """The part of Ulysses that says which rank of how many this is."""

    def __init__(self, rank, size):
        self.rank, self.size = rank, size


def fields_of(scored, place, batch=BATCH):
    tokens = TokenSlice.of(batch, scored, ulysses=place, device=CPU)
    names = ("input_ids", "position_ids", "states", "targets", "sources", "destinations")
    return {name: getattr(tokens, name).tolist() for name in names} | {"cu_seqlens": tokens.layout.cu_seqlens.tolist()}


def test_alone_a_rank_computes_the_pack_as_it_is():
    """Tokens 2 and 4 are trained: from the states of tokens 1 and 3."""
    assert fields_of(ScoredTokens.TRAINED, None) == {
        "input_ids": [5, 9, 2, 4, 8],
        "position_ids": [0, 1, 2, 0, 1],
        "states": [1, 3],
        "targets": [2, 8],
        "sources": [1, 3],
        "destinations": [2, 4],
        "cu_seqlens": [0, 3, 5],
    }


def test_two_ranks_compute_halves_of_the_padded_pack():
    """The example of TokenSlice: padded to 6 tokens with a sequence of its own. The state of token 1 is on rank 0, that
    of token 3 on rank 1."""
    common = {"sources": [1, 3], "destinations": [2, 4], "cu_seqlens": [0, 3, 5, 6]}
    assert fields_of(ScoredTokens.TRAINED, Place(0, 2)) == common | {
        "input_ids": [5, 9, 2],
        "position_ids": [0, 1, 2],
        "states": [1],
        "targets": [2],
    }
    assert fields_of(ScoredTokens.TRAINED, Place(1, 2)) == common | {
        "input_ids": [4, 8, 0],
        "position_ids": [0, 1, 0],
        "states": [0],
        "targets": [8],
    }


def test_first_token_of_a_slice_is_scored_by_the_rank_before():
    """Token 3 trained: its logprob comes from the state of token 2, on rank 0."""
    batch = replace(
        BATCH,
        cu_seqlens=torch.tensor([0, 5], dtype=torch.int32),
        position_ids=torch.arange(5),
        loss_mask=torch.tensor([False, False, False, True, False]),
    )
    first, second = (fields_of(ScoredTokens.TRAINED, Place(rank, 2), batch) for rank in (0, 1))
    assert (first["states"], first["targets"]) == ([2], [4])
    assert (second["states"], second["targets"]) == ([], [])
    assert first["sources"] == second["sources"] == [2]
    assert first["destinations"] == second["destinations"] == [3]


def test_scores_come_from_the_last_state_of_each_sequence():
    """Whatever the loss mask says; the padding is a sequence too, but no sequence of the batch."""
    for place, states in ((None, [2, 4]), (Place(0, 2), [2]), (Place(1, 2), [1])):
        fields = fields_of(ScoredTokens.LAST, place)
        assert (fields["states"], fields["sources"], fields["destinations"]) == (states, [2, 4], [2, 4])


@pytest.mark.parametrize(("num_tokens", "num_ranks", "padded"), [(5, 4, 8), (8, 4, 8), (1, 4, 4), (7, 3, 9)])
def test_padding_is_one_sequence_that_fills_the_last_ranks(num_tokens, num_ranks, padded):
    batch = TokenBatch(
        input_ids=torch.arange(1, num_tokens + 1),
        position_ids=torch.arange(num_tokens),
        cu_seqlens=torch.tensor([0, num_tokens], dtype=torch.int32),
        loss_mask=torch.arange(num_tokens) > 0,
        sample_index=[0],
    )
    ranks = [fields_of(ScoredTokens.TRAINED, Place(rank, num_ranks), batch) for rank in range(num_ranks)]
    num_padding = padded - num_tokens
    assert [x for rank in ranks for x in rank["input_ids"]] == [*range(1, num_tokens + 1), *[0] * num_padding]
    assert [x for rank in ranks for x in rank["position_ids"]] == [*range(num_tokens), *range(num_padding)]
    assert ranks[0]["cu_seqlens"] == [0, num_tokens, *([padded] if num_padding else [])]
    scored = [rank * padded // num_ranks + state for rank in range(num_ranks) for state in ranks[rank]["states"]]
    assert scored == list(range(num_tokens - 1))


def test_trap_10_positions_and_image_tokens_are_cut_where_the_tokens_are():
    """Two sequences of 4 and 5 tokens, an image of two tokens in each; the border of two ranks goes through the second
    image, which the second rank looks at."""
    image = 9
    batch = TokenBatch(
        input_ids=torch.tensor([5, image, image, 2, image, image, 8, 8, 8]),
        position_ids=torch.arange(27).view(3, 9),
        cu_seqlens=torch.tensor([0, 4, 9], dtype=torch.int32),
        loss_mask=torch.tensor([False] * 8 + [True]),
        sample_index=[0, 1],
        images=Images(
            pixel_values=torch.arange(4.0)[:, None],
            num_patches=torch.tensor([2, 2]),
            num_tokens=torch.tensor([2, 2]),
            sizes=torch.tensor([[1, 1, 2]] * 2),
        ),
    )
    tower = VisionTower(image_token_id=image, tower=GridTower(merge_size=1, num_values=1))
    first, second = (
        TokenSlice.of(batch, ScoredTokens.TRAINED, ulysses=Place(rank, 2), device=CPU, tower=tower) for rank in (0, 1)
    )
    assert first.input_ids.tolist() == [5, image, image, 2, image]
    assert second.input_ids.tolist() == [image, 8, 8, 8, 0]
    assert torch.cat([first.position_ids, second.position_ids], dim=1)[:, :9].equal(batch.position_ids)
    assert (first.images.sent, first.images.received) == ([2, 0], [2, 1])
    assert (second.images.sent, second.images.received) == ([1, 1], [0, 1])
    assert [part.images.images.pixel_values[:, 0].tolist() for part in (first, second)] == [[0, 1], [2, 3]]


def test_every_rank_knows_which_tokens_of_the_whole_pack_are_one_image():
    """Where they see each other both ways: after the exchange of tokens for heads a rank has all of them. Their layout
    is that of other packs without an image, and of other models."""
    image, ids = 9, torch.tensor([5, 9, 9, 2, 9, 9, 8, 5, 6, 7, 9])
    batch = TokenBatch(
        input_ids=ids,
        position_ids=torch.arange(11),
        cu_seqlens=torch.tensor([0, 4, 7, 10, 11], dtype=torch.int32),
        loss_mask=torch.tensor([False] * 10 + [True]),
        sample_index=[0, 1, 2, 3],
        images=Images(
            pixel_values=torch.arange(5.0)[:, None],
            num_patches=torch.tensor([2, 2, 1]),
            num_tokens=torch.tensor([2, 2, 1]),
            sizes=torch.tensor([[1, 1, 2], [1, 1, 2], [1, 1, 1]]),
        ),
    )
    tower = VisionTower(image_token_id=image, tower=GridTower(merge_size=1, num_values=1), sees_both_ways=True)

    def layout(rank, batch=batch, tower=tower):
        return TokenSlice.of(batch, ScoredTokens.TRAINED, ulysses=Place(rank, 2), device=CPU, tower=tower).layout

    for rank in (0, 1):
        assert layout(rank).runs == ((1, 4), (1, 3), (1, 3), (1, 1), (1, 1))
        blocks = [None if own is None else own.tolist() for own in layout(rank).blocks]
        assert blocks == [[[-1, 0, 0, -1]], [[1, 1, -1]], None, [[2]], None]
    words = replace(batch, input_ids=ids.clamp(max=8), images=None)
    for other in (layout(0, words), layout(0, tower=replace(tower, sees_both_ways=False))):
        assert other.blocks is None
        assert other.runs == ((1, 4), (2, 3), (2, 1))


def assemble(batch, scored):
    """Of states that hold 10 times their place in the pack: the assembled pack, and the gradient of this rank's."""
    ulysses = Ulysses(dist.group.WORLD) if dist.get_world_size() > 1 else None
    tokens = TokenSlice.of(batch, scored, ulysses=ulysses, device=CPU)
    start = dist.get_rank() * len(tokens.input_ids)
    results = (10.0 * (start + tokens.states)).requires_grad_()
    whole = tokens.assemble(results, ulysses)
    (whole * torch.arange(1.0, 1 + len(whole))).sum().backward()
    places = (start + tokens.states).tolist()
    return whole.tolist(), list(zip(places, results.grad.tolist(), strict=True))


@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_results_arrive_where_they_belong_and_gradients_where_they_came_from(run_ranks, world_size):
    ranks = run_ranks(assemble, world_size, BATCH, ScoredTokens.TRAINED)
    assert [whole for whole, _ in ranks] == [[0.0, 0.0, 10.0, 0.0, 30.0]] * world_size
    assert [x for _, grads in ranks for x in grads] == [(1, 3.0), (3, 5.0)]
    ranks = run_ranks(assemble, world_size, BATCH, ScoredTokens.LAST)
    assert [whole for whole, _ in ranks] == [[0.0, 0.0, 20.0, 0.0, 40.0]] * world_size
    assert [x for _, grads in ranks for x in grads] == [(2, 3.0), (4, 5.0)]


@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_batch_without_samples_gives_zeros_and_a_gradient(run_ranks, world_size):
    """Backward must reach every rank's collectives (trap 21)."""
    empty = pack(random_samples([3]), num_shards=2, max_tokens=4).shards[1][0]
    assert run_ranks(assemble, world_size, empty, ScoredTokens.TRAINED) == [([0.0], [])] * world_size


PADDED = replace(
    BATCH,
    input_ids=torch.tensor([5, 0, 2, 0, 0, 0, 0, 8]),
    position_ids=torch.tensor([0, 1, 2, 3, 0, 1, 0, 1]),
    cu_seqlens=torch.tensor([0, 4, 6, 8], dtype=torch.int32),
    loss_mask=torch.tensor([False] * 3 + [True] + [False] * 4),
    sample_index=[0, 1, 2],
)
"""[5, 0, 2, 0], [0, 0] and [0, 8], where 0 may be padding."""


@pytest.mark.parametrize(
    ("pad_token_id", "sources"), [(None, [3, 5, 7]), (9, [3, 5, 7]), (0, [2, 4, 7]), (8, [3, 5, 6])]
)
def test_a_sequence_is_scored_at_its_last_token_that_is_no_padding(pad_token_id, sources):
    """The result still belongs to its last token; of a sequence of padding alone the first state is scored."""
    tokens = TokenSlice.of(PADDED, ScoredTokens.LAST, ulysses=None, device=CPU, pad_token_id=pad_token_id)
    assert tokens.sources.tolist() == tokens.states.tolist() == sources
    assert tokens.destinations.tolist() == [3, 5, 7]
    assert tokens.assemble(torch.tensor([1.0, 2.0, 3.0]), None).tolist() == [0, 0, 0, 1, 0, 2, 0, 3]


@pytest.mark.parametrize("rank", [0, 1])
def test_the_rank_of_the_scored_state_computes_the_score(rank):
    tokens = TokenSlice.of(PADDED, ScoredTokens.LAST, ulysses=Place(rank, 2), device=CPU, pad_token_id=0)
    assert tokens.states.tolist() == [[2], [0, 3]][rank]
    assert tokens.sources.tolist() == [2, 4, 7]


def test_padding_means_nothing_to_a_language_model():
    tokens = TokenSlice.of(PADDED, ScoredTokens.TRAINED, ulysses=None, device=CPU, pad_token_id=0)
    assert (tokens.sources.tolist(), tokens.destinations.tolist()) == ([2], [3])
