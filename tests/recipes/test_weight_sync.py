"""What a recipe asks of every weight sync: equal receipts on all ranks, and equal logprobs of known tokens."""

import time

import pytest
import torch

from shardwise.recipes.placement import Ranks
from shardwise.recipes.weight_sync import (
    LONGEST_SEEN,
    KnownPrompt,
    WeightSync,
    compare_logprobs,
    known_prompts,
    require_same_receipts,
)
from shardwise.transfer import WeightSyncError
from shardwise.types import Example, ImageRef

RECEIPT = {
    "version": 3,
    "num_tensors": 2,
    "num_proven": 1,
    "num_bytes": 10,
    "digest": "ab",
    "num_bytes_moved": 7,
    "seconds_of_proof": 0.005,
}
PROMPTS = [[5], [6, 7, 8], list(range(20)), [9, 9]]
IMAGE = 6
SEEN = ImageRef(name="a picture", path="a.png", num_patches=8, num_tokens=2, size=[1, 2, 4])


def example(prompt_ids, **options) -> Example:
    return Example(uid="row", prompt_ids=prompt_ids, prompt="", data_source="", ground_truth="", **options)


EXAMPLES = [example(prompt) for prompt in PROMPTS]


def trainer_logprobs(_rank, batches, *_):
    """-1 for every token, at positions after the first of each sequence."""
    return [-torch.ones(len(batch.input_ids)) for batch in batches]


def build(fake_group, remote, *, every=4, receipt=lambda rank, version: RECEIPT, rollout=-1.0):
    def rollout_logprobs(_rank, sequences, image_refs):
        assert len(image_refs) == len(sequences)
        return [[rollout] * (len(sequence) - 1) for sequence in sequences]

    group = fake_group(
        2,
        sync_weights=receipt,
        measure_sync=lambda rank: 0.001 * (rank + 1),
        rollout_logprobs=rollout_logprobs,
        score=trainer_logprobs,
    )
    policy = remote(group, param_dtype="bfloat16")
    sync = WeightSync(policy, Ranks(group, group), EXAMPLES, probe_every_syncs=every)
    return sync, group


def sequences_of(examples, image_token_id=None) -> list[list[int]]:
    return [prompt.token_ids for prompt in known_prompts(examples, image_token_id)]


def test_known_tokens_are_the_beginnings_of_the_first_prompts_that_score_any():
    assert sequences_of(EXAMPLES) == [[6, 7, 8], list(range(13))]
    assert sequences_of(EXAMPLES, IMAGE) == [[7, 8], [*range(6), *range(7, 14)]]
    assert [prompt.places for prompt in known_prompts(EXAMPLES)] == [[1, 2], list(range(1, 13))]


def test_of_prompts_with_images_the_shortest_is_compared_behind_the_first_one():
    positions = torch.arange(21).view(3, 7)
    rows = [
        example([1, 2, IMAGE, IMAGE, 3, 4, 5, 7], image_refs=[SEEN]),
        example([1, IMAGE, IMAGE, 3, IMAGE, IMAGE, 4], image_refs=[SEEN, SEEN], position_ids=positions),
        example([IMAGE] * 2 + [9] * LONGEST_SEEN, image_refs=[SEEN]),
    ]
    *_, known = known_prompts(rows, IMAGE)
    assert (known.token_ids, known.places, known.image_refs) == (rows[1].prompt_ids, [3, 6], [SEEN, SEEN])
    sample = known.sample
    assert sample.loss_mask.tolist() == [False, False, False, True, False, False, True]
    assert (sample.image_refs, sample.position_ids) == ([SEEN, SEEN], positions)
    *_, long = known_prompts([example([IMAGE, *[9] * 100], image_refs=[SEEN])], IMAGE)
    assert long.places == list(range(1, 14))
    assert len(known_prompts(rows[2:], IMAGE)) == 1, "too long to look at"
    assert len(known_prompts([example([1, IMAGE, IMAGE], image_refs=[SEEN])], IMAGE)) == 1, "nothing stands behind it"


def test_prompts_of_one_word_are_no_reason_not_to_look():
    assert sequences_of([example(prompt) for prompt in ([5], [4, IMAGE], [])], IMAGE) == [[5, 5], [4, 4]]


def test_a_sync_asks_every_rank_and_says_what_it_moved(fake_group, remote):
    sync, group = build(fake_group, remote)
    assert sync.sync(3)["sync/bytes"].result() == 7
    assert group.calls == [("measure_sync",), ("sync_weights", 3)]


def test_of_every_sync_it_is_known_what_share_of_its_time_the_bytes_need(fake_group, remote):
    """Seven bytes at 2 ms each on the slower rank, in a sync of 50 ms."""

    def slowly(rank, version):
        time.sleep(0.025)
        return RECEIPT

    sync, group = build(fake_group, remote, receipt=slowly)
    for version in (3, 4):
        sync.sync(version)
        assert 0.1 < sync.shares["sync/share_of_limit"] <= 0.28
        assert 0 < sync.shares["sync/share_of_proof"] <= 0.2
        assert sync.shares["sync/share_read_back"] == 1 / 2
    assert group.methods == ["measure_sync", "sync_weights", "sync_weights"]


@pytest.mark.parametrize("key", ["version", "num_tensors", "num_bytes", "digest"])
def test_a_rank_that_holds_other_weights_is_named(fake_group, remote, key):
    sync, _ = build(fake_group, remote, receipt=lambda rank, version: RECEIPT | ({key: 77} if rank else {}))
    with pytest.raises(WeightSyncError, match=f"weight sync 3: rank 1 has {key}=77, rank 0 has "):
        sync.sync(3)


def test_only_ranks_that_hold_the_same_part_of_the_weights_hold_the_same():
    receipts = {rank: RECEIPT | {"digest": f"part {rank % 2}", "num_bytes": 7 + rank % 2} for rank in range(2, 6)}
    require_same_receipts(3, receipts, num_parts=2)
    with pytest.raises(WeightSyncError, match="rank 3 has num_bytes=8, rank 2 has 7; both should hold the same"):
        require_same_receipts(3, receipts)
    receipts[5] |= {"digest": "another"}
    with pytest.raises(WeightSyncError, match="weight sync 3: rank 5 has digest=another, rank 3 has part 1; both"):
        require_same_receipts(3, receipts, num_parts=2)


@pytest.mark.parametrize(("every", "probed"), [(4, [1, 4, 8]), (1, list(range(1, 10))), (0, [])])
def test_f39_the_first_sync_and_every_nth_are_probed_at_temperature_1(fake_group, remote, every, probed):
    sync, group = build(fake_group, remote, every=every)
    done, reported = [], []
    for version in range(1, 10):
        num_calls = len(group.calls)
        metrics = sync.probe(version)
        calls = group.calls[num_calls:]
        if calls:
            done.append(version)
            (score, _, role, _, temperature), (method, sequences, image_refs) = calls
            assert image_refs == [[], []]
            assert (score, role, temperature, method) == ("score", "policy", 1.0, "rollout_logprobs")
            assert sequences == [[6, 7, 8], list(range(13))]
        if metrics:
            reported.append(version)
            assert metrics["sync/probe_max_difference"].result() == 0
    assert done == probed
    assert reported == probed[1:]


def test_a_probe_whose_version_was_never_synced_is_made_up_for(fake_group, remote):
    sync, group = build(fake_group, remote, every=4)
    probed = [version for version in (0, 3, 5, 6, 7, 9, 12) if sync.probe(version) or version == 0]
    assert probed == [0, 5, 9, 12]
    assert group.methods.count("rollout_logprobs") == 4


def test_a_run_that_goes_on_reports_the_probes_of_one_that_was_never_interrupted(fake_group, remote):
    reported = []
    for first in (0, 6):
        sync, _ = build(fake_group, remote, every=4)
        reported.append([version for version in range(first, 17) if sync.probe(version)])
    assert reported == [[4, 8, 12, 16], [8, 12, 16]]


@pytest.mark.parametrize(("rollout", "is_wrong"), [(-1.04, False), (-1.06, True), (float("nan"), True)])
def test_f39_a_mean_difference_above_the_bound_of_the_dtype_stops_the_run(fake_group, remote, rollout, is_wrong):
    sync, _ = build(fake_group, remote, rollout=rollout)
    if not is_wrong:
        sync.probe(3)
        assert sync.probe(4)["sync/probe_mean_difference"].result() == pytest.approx(0.04, abs=1e-6)
        return
    with pytest.raises(WeightSyncError, match="weight sync 4: the rollout engine of rank 0 gives token 7 "):
        sync.probe(4)


def test_the_token_that_differs_most_is_named_with_both_values():
    with pytest.raises(WeightSyncError) as caught:
        compare_logprobs(
            9,
            [KnownPrompt("a", [5, 6], [1]), KnownPrompt("b", [7, 8, 9], [1, 2])],
            [[-1.0], [-2.0, -3.0]],
            [[-1.0], [-2.1, -4.25]],
            dtype="float32",
            rank=1,
        )
    assert str(caught.value).startswith(
        "weight sync 9: the rollout engine of rank 1 gives token 9 (place 2 of known prompt 1) a logprob of -4.2500, "
        "the trainer -3.0000; over 3 known tokens they differ by 0.4500 on average, more than the 0.001 of float32."
    )
