"""Tokens trained are tokens sampled: in a turn or several, interrupted or masked; and whatever else is found out."""

import json
from dataclasses import asdict, replace

import pytest
import torch

from shardwise.config import RLConfig, TrainingError
from shardwise.data import pack
from shardwise.observability import Spans
from shardwise.recipes.learner import Engines, Learner
from shardwise.recipes.sampling.episodes import empty_completion, with_observation, with_turn
from shardwise.recipes.sampling.sampled_tokens import (
    TokenAccount,
    num_spanned,
    require_sampled,
    token_metrics,
    with_spans,
)
from shardwise.recipes.sampling.sampler import Rollout
from shardwise.recipes.sampling.samples import to_samples
from shardwise.types import Completion, Example, GenerateRequest, MetricValue, RolloutGroup

PROMPT = [7, 8, 9]


def call(read, sampled, *, reason="stop", partial_token_ids=()) -> Completion:
    """What an engine answers."""
    request = GenerateRequest(
        uid="a", prompt_ids=list(read), partial_token_ids=list(partial_token_ids), max_tokens=9, temperature=1.0
    )
    answer = Completion(token_ids=list(sampled), logprobs=[-1.0] * len(sampled), finish_reason=reason, policy_version=2)
    (found,) = with_spans(request, [answer])
    return found


def episode() -> Completion:
    """Two turns of 3 and 2 tokens with an answer of 2 between them; new weights came in the first one."""
    begun = call(PROMPT, [21, 22], reason="interrupted")
    turn = begun.then(call(PROMPT, [23], partial_token_ids=[21, 22]))
    answered = with_observation(with_turn(empty_completion(), turn), [31, 32])
    return with_turn(answered, call(PROMPT + answered.token_ids, [24, 25]))


def group_of(*completions, uid="5", failed=None) -> RolloutGroup:
    count = len(completions)
    return RolloutGroup(
        example=Example(uid=uid, prompt_ids=PROMPT, prompt="", data_source="", ground_truth=None),
        completions=list(completions),
        texts=[""] * count,
        answers=[""] * count,
        rewards=[0.0] * count,
        reward_parts=[{}] * count,
        failures=["it raised" if one else None for one in failed or [False] * count],
    )


def samples_of(*completions, **options):
    return to_samples([group_of(*completions, **options)], mask_failed=True)


def hold(samples, *, altered=None):
    """Packs the samples over two ranks, alters a batch, and looks."""
    packed = pack(samples, num_shards=2, max_tokens=64)
    if altered is not None:
        altered(next(batch for shard in packed.shards for batch in shard if batch.sample_index))
    require_sampled(samples, packed)


def test_what_was_sampled_may_be_trained_and_any_of_it_masked():
    interrupted_at_once = call(PROMPT, [], reason="interrupted").then(call(PROMPT, [41, 42]))
    samples = samples_of(episode(), call(PROMPT, [24]), interrupted_at_once, empty_completion())
    assert [sample.loss_mask.tolist() for sample in samples[:2]] == [
        [False] * 3 + [True] * 3 + [False] * 2 + [True] * 2,
        [False] * 3 + [True],
    ]
    hold(samples)
    hold([replace(sample, loss_mask=sample.loss_mask & (sample.token_ids != 22)) for sample in samples])
    hold(samples_of(episode(), call(PROMPT, [24]), failed=[True, False]))
    hold([replace(sample, spans=None, token_ids=sample.token_ids + 1) for sample in samples])  # no engine sampled them


def test_an_agents_own_prompt_is_what_was_read():
    own = replace(call([1, 2], [24, 25]), prompt_ids=[1, 2])
    hold(samples_of(own))
    with pytest.raises(TrainingError, match="tokens 2 to 3 of 5, or tokens before them, are not those that were"):
        hold(samples_of(replace(own, prompt_ids=None)))


@pytest.mark.parametrize("place", range(10))
def test_trap_32_a_token_that_was_altered_is_found_wherever_it_is(place):
    """In the prompt, in a turn, or in what the environment said between two."""

    def alter(batch):
        batch.input_ids[place] += 1

    with pytest.raises(
        TrainingError,
        match=r"^tokens trained are not the tokens sampled: of row 5 tokens \d to \d of 10, or tokens before them, "
        "are not those that were sampled; an error of Shardwise's, please report it",
    ):
        hold(samples_of(episode()), altered=alter)


def test_an_altered_completion_never_reaches_the_ranks(fake_group, remote):
    """As where its text is tokenized again: other tokens, and more of them."""
    config = RLConfig.parse(
        {
            "model": {"path": "m"},
            "data": {"train_files": "t.jsonl", "max_prompt_tokens": 9},
            "reward": {"functions": "a:b"},
        },
        origin="test",
    )
    trained = fake_group(1, train=lambda *_: {"train/loss": MetricValue.sum(1.0)})
    learner = Learner(Engines(remote(trained, max_tokens_per_micro_batch=512)), config)
    whole, other = call(PROMPT, [24, 25, 3]), group_of(call(PROMPT, [24]), uid="6")
    learner.learn(Rollout(groups=[group_of(whole), other], greedy_rewards=None, metrics={}), 1, Spans())
    assert trained.methods == ["train"]
    for token_ids in ([24, 26, 3], [24, 25, 3, 3], [24, 25]):
        altered = group_of(replace(whole, token_ids=token_ids, logprobs=[-1.0] * len(token_ids)))
        rollout = Rollout(groups=[other, altered], greedy_rewards=None, metrics={})
        with pytest.raises(TrainingError, match="of row 5 "):
            learner.learn(rollout, 2, Spans())
    assert trained.methods == ["train"]


def test_tokens_that_are_cut_or_trained_without_having_been_sampled_are_found():
    cut = [replace(s, token_ids=s.token_ids[:-1], loss_mask=s.loss_mask[:-1], rollout_logprobs=None)
           for s in samples_of(episode())]  # fmt: skip
    with pytest.raises(TrainingError, match="of row 5 tokens 8 to 9 were sampled, and 9 are left"):
        hold(cut)
    for shift, first in ((1, 6), (-1, 2)):
        masks = [sample.loss_mask.roll(shift) & (torch.arange(10) > 0) for sample in samples_of(episode())]
        shifted = [replace(s, loss_mask=mask) for s, mask in zip(samples_of(episode()), masks, strict=True)]
        with pytest.raises(TrainingError, match=f"of row 5 token {first} of 10 is trained, and was not"):
            hold(shifted)
    with pytest.raises(TrainingError, match="token 3 of 10 is trained, and was not sampled"):
        hold(samples_of(replace(episode(), spans=[])))


def test_every_token_that_was_sampled_is_accounted_for(capsys):
    groups = [group_of(episode(), call(PROMPT, [24])), group_of(call(PROMPT, [1, 2, 3]), failed=[True])]
    samples = to_samples(groups, mask_failed=True)
    samples[0].loss_mask[4] = False  # as rollout correction rejects a token
    metrics = {name: value.result() for name, value in token_metrics(groups, samples).items()}
    assert metrics == {"tokens/trained": 4 + 1, "tokens/masked": 1 + 3}
    assert num_spanned(episode()) == 5
    unseen = replace(episode(), is_sampled=[False, *[True] * 2, *[False] * 2, *[True] * 2])
    reason = "of row 5 rollout engines have sampled 5 tokens, and 4 of 7 count as sampled"
    with pytest.raises(TrainingError, match=reason):
        token_metrics([group_of(unseen)], samples_of(unseen))
    with TokenAccount("rl") as account:
        for _ in range(2):
            account.add(token_metrics(groups, samples) | {"tokens/dropped": MetricValue.sum(600)})
    assert capsys.readouterr().out == "rl: sampled 1,218 tokens: 10 trained, 8 masked, 1,200 dropped\n"
    with TokenAccount("rl"):
        pass
    assert capsys.readouterr().out == ""


def test_a_rollout_that_a_checkpoint_has_kept_is_held_to_what_was_sampled():
    rollout = Rollout(groups=[group_of(episode())], greedy_rewards=None, metrics={})
    again = Rollout.from_json(json.loads(json.dumps(rollout.to_json())), [rollout.groups[0].example])
    assert again.groups[0].completions[0].spans == episode().spans
    hold(to_samples(again.groups))
    assert asdict(again)["groups"][0]["completions"] == asdict(rollout)["groups"][0]["completions"]
