"""Converts a rollout into samples to train on, metrics of the step, and rows of samples.jsonl."""

from collections.abc import Callable, Mapping, Sequence
from itertools import islice
from typing import Any

import torch

from shardwise.config import RewardConfig
from shardwise.data.vision import continued_positions
from shardwise.types import Completion, Example, Metrics, MetricValue, RolloutGroup, Sample

NUM_LOGGED_SAMPLES = 16
"""Completions of each step that samples.jsonl keeps."""


def to_samples(groups: Sequence[RolloutGroup], *, mask_failed: bool = False) -> list[Sample]:
    """Joins prompt and completion in one sequence each; of the completion the tokens that the policy sampled are
    trained.

    In a group without a baseline no token is trained.

    Args:
        mask_failed: no token of a completion whose reward failed is trained, so that nothing counts it.
    """
    samples = []
    for number, group in enumerate(groups):
        for completion, reward, failed in zip(group.completions, group.rewards, group.failed, strict=True):
            prompt_ids = group.prompt_ids(completion)
            num_prompt = len(prompt_ids)
            token_ids = torch.tensor(prompt_ids + completion.token_ids)
            rollout_logprobs = torch.zeros(len(token_ids))
            rollout_logprobs[num_prompt:] = torch.tensor(completion.logprobs)
            is_trained = torch.arange(len(token_ids)) >= num_prompt
            if completion.is_sampled is not None:
                is_trained[num_prompt:] = torch.tensor(completion.is_sampled)
            experts = completion.experts
            if experts is not None:  # the last token went through no router
                experts = torch.cat([experts, torch.full_like(experts[:1], -1)])
            samples.append(
                Sample(
                    uid=group.example.uid,
                    token_ids=token_ids,
                    position_ids=continued_positions(group.example.position_ids, len(token_ids)),
                    image_refs=group.example.image_refs,
                    loss_mask=is_trained & (group.has_baseline and not (mask_failed and failed)),
                    rollout_logprobs=rollout_logprobs,
                    experts=experts,
                    turn_starts=[num_prompt + start for start in completion.turn_starts],
                    spans=completion.spans,
                    reward=reward,
                    group=number,
                )
            )
    return samples


def rollout_metrics(groups: Sequence[RolloutGroup]) -> Metrics:
    """Returns metrics of the completions' lengths, and of their turns if an environment answered."""
    completions = [completion for group in groups for completion in group.completions]
    lengths = [completion.num_sampled for completion in completions]
    metrics: Metrics = {
        "rollout/response_tokens": MetricValue.mean(sum(lengths), len(lengths)),
        "rollout/response_tokens_max": MetricValue.max(max(lengths)),
        "rollout/truncated": MetricValue.mean(sum(c.finish_reason == "length" for c in completions), len(completions)),
    }
    if any(completion.is_sampled is not None for completion in completions):
        num_turns = [completion.num_turns for completion in completions]
        num_observed = [len(completion.token_ids) - completion.num_sampled for completion in completions]
        metrics |= {
            "rollout/num_turns": MetricValue.mean(sum(num_turns), len(num_turns)),
            "rollout/observed_tokens": MetricValue.mean(sum(num_observed), len(num_observed)),
        }
    return metrics


def staleness_metrics(groups: Sequence[RolloutGroup], *, version: int) -> Metrics:
    """Returns how many updates lie between the weights that sampled and those that are trained, of `version`.
    Completions count by their oldest tokens: mean, maximum, and share at each number. Also returns the mean over
    sampled tokens, and the share of completions that new weights continued. Completions without a token, such as those
    of agents that failed at once, do not count."""
    completions = [completion for group in groups for completion in group.completions if completion.token_ids]
    ages = [version - completion.policy_version for completion in completions]
    of_tokens = [version - sampled for completion in completions for sampled in completion.sampled_versions]
    oldest = max(ages, default=0)
    shares = {f"staleness/share_{age}": MetricValue.mean(ages.count(age), len(ages)) for age in range(oldest + 1)}
    return {
        "staleness/mean": MetricValue.mean(sum(ages), len(ages)),
        "staleness/max": MetricValue.max(oldest),
        "staleness/token_mean": MetricValue.mean(sum(of_tokens), len(of_tokens)),
        "staleness/interrupted": MetricValue.mean(
            sum(completion.token_versions is not None for completion in completions), len(completions)
        ),
        **shares,
    }


def reward_metrics(groups: Sequence[RolloutGroup], *, mask_failed: bool = False) -> Metrics:
    """Returns metrics of rewards, over all sources and for each if there are several, and of their named parts.

    Args:
        mask_failed: rewards that failed count only in reward/failed.
    """
    all_failed = [failed for group in groups for failed in group.failed]
    by_source: dict[str, list[float]] = {}
    for group in groups:
        kept = [r for r, failed in zip(group.rewards, group.failed, strict=True) if not (mask_failed and failed)]
        by_source.setdefault(group.example.data_source, []).extend(kept)
    rewards = torch.tensor([r for source in by_source.values() for r in source], dtype=torch.float64)
    metrics: Metrics = {
        "reward/mean": MetricValue.mean(float(rewards.sum()), len(rewards)),
        "reward/failed": MetricValue.mean(sum(all_failed), len(all_failed)),
    }
    if len(rewards):
        metrics["reward/max"] = MetricValue.max(float(rewards.max()))
    if len(by_source) > 1:
        metrics |= {
            f"reward/mean/{name}": MetricValue.mean(sum(values), len(values)) for name, values in by_source.items()
        }
    parts = [part for group in groups for part in group.reward_parts]
    for name in sorted({name for part in parts for name in part}):
        values = [part[name] for part in parts if name in part]
        metrics[f"reward_part/{name}"] = MetricValue.mean(sum(values), len(values))
    return metrics


def sample_rows(
    groups: Sequence[RolloutGroup],
    step: int,
    prompt_text: Callable[[Example, Completion], str],
    *,
    judged: bool = True,
) -> list[Mapping[str, Any]]:
    """Returns the first completions of a step as rows of samples.jsonl.

    Args:
        prompt_text: `Rollouter.prompt_text`, or the like.
        judged: whether completions were judged, so that rows have rewards.
    """
    rows = (
        {
            "step": step,
            "uid": group.example.uid,
            "data_source": group.example.data_source,
            "prompt": prompt_text(group.example, completion),
            "completion": text,
            "ground_truth": group.example.ground_truth,
            **({"reward": reward, "reward_parts": parts, "reward_failure": failure} if judged else {}),
            "finish_reason": completion.finish_reason,
            "policy_version": completion.policy_version,
            "token_versions": completion.token_versions,
            "num_turns": completion.num_turns,
            "prompt_ids": group.prompt_ids(completion),
            "token_ids": completion.token_ids,
            "is_sampled": completion.is_sampled,
            "logprobs": completion.logprobs,
        }
        for group in groups
        for completion, text, reward, parts, failure in zip(
            group.completions, group.texts, group.rewards, group.reward_parts, group.failures, strict=True
        )
    )
    return list(islice(rows, NUM_LOGGED_SAMPLES))


def reward_columns(groups: Sequence[RolloutGroup], config: RewardConfig) -> dict[str, list[float]]:
    """Returns reward function -> its scores, with reward.failure_value where its call failed; for a manager, each part
    that all its results have. Other values that a function returned are not rewards."""
    parts = [own for group in groups for own in group.reward_parts]
    failed = [one for group in groups for one in group.failed]
    names = [entry.name for entry in config.functions]
    if config.manager is not None:
        given = [set(own) for own, is_failed in zip(parts, failed, strict=True) if not is_failed]
        names = sorted(set.intersection(*given)) if given else []
    return {name: [own.get(name, config.failure_value) for own in parts] for name in names}
