from dataclasses import replace

import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st

from shardwise.config import DataError
from shardwise.data.packing import pack, unpack
from shardwise.types import PER_TOKEN_FIELDS, Denominators, Sample


def sample(length, *, uid="s", first=0, trained=None, **fields):
    mask = torch.arange(length) >= (1 if trained is None else length - trained)
    return Sample(uid=uid, token_ids=torch.arange(first, first + length), loss_mask=mask, **fields)


def samples_of(lengths, **fields):
    return [sample(n, uid=str(i), first=100 * i, **fields) for i, n in enumerate(lengths)]


def layout(step):
    return [[batch.sample_index for batch in shard] for shard in step.shards]


def test_a_batch_by_hand():
    samples = [
        Sample(
            uid="a",
            token_ids=torch.tensor([4, 8]),
            loss_mask=torch.tensor([False, True]),
            advantages=torch.tensor([0.0, 0.5]),
        ),
        Sample(
            uid="b",
            token_ids=torch.tensor([5, 9, 2]),
            loss_mask=torch.tensor([False, False, True]),
            advantages=torch.tensor([0.0, 0.0, -1.0]),
        ),
    ]
    step = pack(samples, num_shards=1, max_tokens=5)
    [[batch]] = step.shards
    assert (batch.sample_index, batch.uids) == ([1, 0], ["b", "a"])
    assert batch.input_ids.tolist() == [5, 9, 2, 4, 8]
    assert batch.position_ids.tolist() == [0, 1, 2, 0, 1]
    assert batch.cu_seqlens.tolist() == [0, 3, 5]
    assert batch.cu_seqlens.dtype == torch.int32
    assert batch.loss_mask.tolist() == [False, False, True, False, True]
    assert batch.advantages.tolist() == [0.0, 0.0, -1.0, 0.0, 0.5]
    assert batch.old_logprobs is None
    assert step.denominators == Denominators(num_tokens=2, num_sequences=2)


def test_longest_first_levels_the_token_counts():
    # Best-fit needs 3 bins, so two ranks take 4: 7 | 6 | 5+2 | 4+2. The ranks' k-th batches are alike.
    step = pack(samples_of([7, 6, 5, 4, 2, 2]), num_shards=2, max_tokens=10)
    assert layout(step) == [[[0], [3, 4]], [[2, 5], [1]]]


def test_batches_are_dealt_back_and_forth_so_that_ranks_carry_alike():
    step = pack(samples_of([6, 9, 7, 8]), num_shards=2, max_tokens=10)
    assert layout(step) == [[[1], [0]], [[3], [2]]]  # 9 + 6 and 8 + 7 tokens


def test_best_fit_is_used_where_levelling_does_not_fit():
    # Two bins of 10 hold 6+4 and 5+3+2 exactly. Longest-first puts 6 | 5, then 4 onto the 5, 3 onto the 6 and the 2 on
    # neither (9 + 2 is over the cap), so only best-fit-decreasing reaches two bins.
    step = pack(samples_of([6, 5, 4, 3, 2]), num_shards=1, max_tokens=10)
    assert sorted(sorted(batch.sample_index) for batch in step.shards[0]) == [[0, 2], [1, 3, 4]]


def test_rank_without_sample_gets_one_masked_token_with_the_same_fields():
    step = pack(samples_of([3], advantages=torch.ones(3)), num_shards=3, max_tokens=4)
    assert layout(step) == [[[0]], [[]], [[]]]
    empty = step.shards[2][0]
    assert (empty.input_ids.tolist(), empty.position_ids.tolist(), empty.cu_seqlens.tolist()) == ([0], [0], [0, 1])
    assert (empty.loss_mask.tolist(), empty.advantages.tolist()) == ([False], [0.0])
    assert (empty.input_ids.dtype, empty.cu_seqlens.dtype, empty.loss_mask.dtype) == (
        torch.int64,
        torch.int32,
        torch.bool,
    )
    assert empty.ref_logprobs is None


def test_no_samples_give_every_rank_one_empty_batch():
    step = pack([], num_shards=2, max_tokens=4)
    assert layout(step) == [[[]], [[]]]
    assert step.denominators == Denominators(num_tokens=0, num_sequences=0)
    assert unpack(step, [[torch.zeros(1)], [torch.zeros(1)]]) == []


def test_sequences_without_trained_tokens_are_packed_but_not_counted():
    step = pack([sample(4, trained=0), sample(4, trained=3)], num_shards=1, max_tokens=8)
    assert layout(step) == [[[0, 1]]]
    assert step.denominators == Denominators(num_tokens=3, num_sequences=1)


def test_trap_02_sample_over_the_cap_is_refused_by_name_with_both_numbers():
    """Trap 2."""
    with pytest.raises(DataError, match=r"sample 1 has 9 tokens, more than engine\.max_tokens_per_micro_batch=8,"):
        pack(samples_of([3, 9]), num_shards=1, max_tokens=8)
    assert layout(pack(samples_of([8]), num_shards=1, max_tokens=8)) == [[[0]]]


def test_samples_kept_together_share_a_batch_side_by_side():
    samples = samples_of([4, 1, 2, 2, 3, 4])
    step = pack(samples, num_shards=2, max_tokens=9, keep_together=2)
    assert layout(step) == [[[0, 1, 2, 3]], [[4, 5]]]
    assert step.shards[0][0].input_ids.tolist() == torch.cat([s.token_ids for s in samples[:4]]).tolist()


def test_samples_to_keep_together_over_the_cap_are_refused():
    with pytest.raises(DataError, match=r"the 2 samples of 0 have 9 tokens, .* what is compared stays in one micro"):
        pack(samples_of([5, 4]), num_shards=1, max_tokens=8, keep_together=2)


def test_rewards_go_with_their_sequences():
    samples = [replace(sample(n), reward=float(n)) for n in (2, 5, 3)]
    (batch,) = pack(samples, num_shards=1, max_tokens=16).shards[0]
    assert batch.rewards.tolist() == [5.0, 3.0, 2.0]
    assert batch.cu_seqlens.diff().tolist() == [5, 3, 2]


def test_fields_that_only_some_samples_have_are_a_bug():
    with pytest.raises(AssertionError, match="1 of 2 samples have ref_logprobs"):
        pack([sample(2), sample(2, ref_logprobs=torch.zeros(2))], num_shards=1, max_tokens=8)


lengths_and_shards = st.tuples(st.lists(st.integers(1, 32), max_size=60), st.integers(1, 5), st.integers(32, 64))


@given(lengths_and_shards)
def test_trap_02_packing_holds_its_promises(case):
    """Trap 2: no batch exceeds the cap, whatever the lengths."""
    lengths, num_shards, max_tokens = case
    samples = samples_of(lengths)
    step = pack(samples, num_shards=num_shards, max_tokens=max_tokens)
    batches = [batch for shard in step.shards for batch in shard]
    assert len(step.shards) == num_shards
    assert len({len(shard) for shard in step.shards}) == 1
    assert len(step.shards[0]) >= 1
    assert all(len(batch.input_ids) <= max_tokens for batch in batches)
    assert sorted(index for batch in batches for index in batch.sample_index) == list(range(len(samples)))
    for batch in batches:
        sizes = batch.cu_seqlens.diff().tolist()
        assert sizes == sorted(sizes, reverse=True)
        pieces = batch.input_ids.split(sizes)
        for index, piece in zip(batch.sample_index, pieces, strict=False):
            assert piece.tolist() == samples[index].token_ids.tolist()
        assert batch.position_ids.tolist() == [position for size in sizes for position in range(size)]
    assert step.denominators.num_tokens == sum(int(batch.loss_mask.sum()) for batch in batches)
    assert step.denominators.num_tokens == sum(n - 1 for n in lengths)
    assert step.denominators.num_sequences == sum(n > 1 for n in lengths)
    assert layout(pack(samples, num_shards=num_shards, max_tokens=max_tokens)) == layout(step)


@given(lengths_and_shards)
def test_number_of_batches_is_near_its_lower_bound(case):
    lengths, num_shards, max_tokens = case
    step = pack(samples_of(lengths), num_shards=num_shards, max_tokens=max_tokens)
    # No two bins of a best fit could be merged, so they are more than half full on average.
    fewest = -(-sum(lengths) // max_tokens)
    assert len(step.shards[0]) * num_shards < 2 * max(fewest, 1) + num_shards


@given(lengths_and_shards, st.sampled_from(PER_TOKEN_FIELDS))
def test_unpack_is_the_inverse_of_pack(case, name):
    lengths, num_shards, max_tokens = case
    assume(lengths)  # without samples there are no fields
    samples = [sample(n, **{name: torch.rand(n)}) for n in lengths]
    step = pack(samples, num_shards=num_shards, max_tokens=max_tokens)
    values = unpack(step, [[getattr(batch, name) for batch in shard] for shard in step.shards])
    assert len(values) == len(samples)
    for value, packed in zip(values, samples, strict=True):
        torch.testing.assert_close(value, getattr(packed, name), rtol=0, atol=0)
