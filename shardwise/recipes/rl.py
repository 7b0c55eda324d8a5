"""Reinforcement learning with verifiable rewards: GRPO and its family."""

from collections.abc import Iterator, Mapping
from dataclasses import replace
from itertools import islice
from typing import Any

import torch
from torch import Tensor

from shardwise.algorithms import group_metrics, grpo, kl_divergence, outcome_token_rewards, rloo
from shardwise.config import AlgorithmConfig, ModelConfig, RLConfig
from shardwise.controller.base import WorkerGroup
from shardwise.data import BatchLoader, prompt_examples
from shardwise.observability import SampleLog
from shardwise.recipes.build import BuiltPolicy, build_policy, open_model
from shardwise.recipes.evaluate import greedy_accuracy
from shardwise.recipes.rollouts import Rollouter
from shardwise.recipes.run import Run
from shardwise.recipes.steps import token_logprobs, train_step
from shardwise.rewards import make_rewards
from shardwise.types import Metrics, MetricValue, RolloutGroup, Sample, merge_metrics

NUM_LOGGED_SAMPLES = 16
"""Completions of each step that samples.jsonl keeps."""


def train(config: RLConfig, group: WorkerGroup) -> None:
    """Runs the whole recipe. One step consumes `rollout.num_prompts` groups sampled by the current weights and makes
    num_minibatches x num_epochs optimizer steps."""
    model = open_model(config.model)
    model.require_context(
        "data.max_prompt_tokens + rollout.max_response_tokens",
        config.data.max_prompt_tokens + config.rollout.max_response_tokens,
    )
    data = config.data
    examples = prompt_examples(data, data.train_files, model.tokenizer, max_rows=data.max_train_rows)
    held_out = None
    if data.validation_files:
        held_out = prompt_examples(data, data.validation_files, model.tokenizer, max_rows=data.max_validation_rows).rows
    loader = BatchLoader(len(examples.rows), config.rollout.num_prompts, seed=config.trainer.seed, shuffle=data.shuffle)
    total_steps = config.trainer.total_steps or loader.steps_per_epoch * config.trainer.num_epochs
    policy = build_engines(config, model.config, group, total_steps)
    counts = policy.metrics | {f"data/{name}": MetricValue.max(count) for name, count in examples.counts.items()}
    with (
        make_rewards(config.reward) as rewards,
        Run(
            "rl",
            config,
            model.config,
            config.trainer,
            group=group,
            total_steps=total_steps,
            model_size=policy.size,
        ) as run,
        SampleLog(run.output_dir) as sample_log,
    ):
        mask_failed = config.reward.on_failure == "mask"
        rollouter = Rollouter(group, model.tokenizer, config.rollout, rewards)
        for step in run.steps():
            with run.spans("rollout"):
                groups = rollouter.collect(
                    [examples.rows[index] for index in loader.indices(step - 1)],
                    num_completions=config.rollout.group_size,
                    temperature=config.rollout.temperature,
                    seed=config.trainer.seed,
                    stream=f"step {step}",
                )
            samples = to_samples(groups, mask_failed=mask_failed)
            with run.spans("logprobs"):
                samples = score(samples, config, group)
            samples, metrics = with_advantages(samples, config.algorithm)
            with run.spans("train"):
                metrics |= merge_metrics(
                    train_step(group, minibatch, config.engine)
                    for minibatch in minibatches(samples, config.algorithm, seed=config.trainer.seed, step=step)
                )
            with run.spans("sync"):
                group.call("sync_weights", step)
            if held_out is not None and run.should_validate(step):
                with run.spans("validate"):
                    metrics |= greedy_accuracy(rollouter, held_out, config.reward)
            sample_log.append(sample_rows(groups, step))
            metrics |= rollout_metrics(groups, mask_failed=mask_failed) | counts
            run.report(step, metrics, num_tokens=sum(len(sample.token_ids) for sample in samples))


def build_engines(config: RLConfig, model: ModelConfig, group: WorkerGroup, total_steps: int) -> BuiltPolicy:
    """Policy, reference where a KL term needs one, and rollout engines that serve the policy's weights, verified."""
    num_updates = total_steps * config.algorithm.num_minibatches * config.algorithm.num_epochs
    policy = build_policy(group, model, config.engine, config.trainer, num_updates)
    group.call("use_policy_loss", config.algorithm.model_dump_json(), config.rollout.temperature)
    folder = model.model_dump_json()
    if config.algorithm.kl_coef > 0 and config.engine.lora is None:  # the reference is the policy without its adapter
        group.call("build_reference", folder, config.reference_layout().model_dump_json())
    group.call("build_rollout", folder, config.rollout.generation().model_dump_json(), config.engine.param_dtype)
    group.call("sync_weights", 0)
    return policy


def to_samples(groups: list[RolloutGroup], *, mask_failed: bool = False) -> list[Sample]:
    """Prompt and completion in one sequence; the completion's tokens are trained.

    Args:
        mask_failed: a completion whose reward failed has no trained token, so that nothing counts it.
    """
    samples = []
    for number, group in enumerate(groups):
        num_prompt = len(group.example.prompt_ids)
        for completion, reward, failed in zip(group.completions, group.rewards, group.failed, strict=True):
            token_ids = torch.tensor(group.example.prompt_ids + completion.token_ids)
            rollout_logprobs = torch.zeros(len(token_ids))
            rollout_logprobs[num_prompt:] = torch.tensor(completion.logprobs)
            samples.append(
                Sample(
                    uid=group.example.uid,
                    token_ids=token_ids,
                    loss_mask=(torch.arange(len(token_ids)) >= num_prompt) & (not (mask_failed and failed)),
                    rollout_logprobs=rollout_logprobs,
                    reward=reward,
                    group=number,
                    min_policy_version=completion.policy_version,
                    max_policy_version=completion.policy_version,
                )
            )
    return samples


def score(samples: list[Sample], config: RLConfig, group: WorkerGroup) -> list[Sample]:
    """Adds what this algorithm needs: old logprobs where a sample is trained on more than once per rollout (or after
    another minibatch has moved the policy), reference logprobs where there is a KL term."""
    algorithm = config.algorithm
    if algorithm.num_minibatches * algorithm.num_epochs > 1:
        logprobs = token_logprobs(group, samples, config.engine, method="policy_logprobs")
        samples = [replace(s, old_logprobs=values) for s, values in zip(samples, logprobs, strict=True)]
    if algorithm.kl_coef > 0:
        logprobs = token_logprobs(group, samples, config.reference_layout(), method="reference_logprobs")
        samples = [replace(s, ref_logprobs=values) for s, values in zip(samples, logprobs, strict=True)]
    return samples


def with_advantages(samples: list[Sample], config: AlgorithmConfig) -> tuple[list[Sample], Metrics]:
    """Adds advantages; a KL term in the reward is subtracted token by token before them."""
    loss_mask = _padded([sample.loss_mask for sample in samples])
    token_rewards = outcome_token_rewards(torch.tensor([sample.reward for sample in samples]), loss_mask)
    if config.kl_in == "reward" and config.kl_coef > 0:
        # The rollout's logprobs are the policy's own: its weights were synced before it sampled.
        policy = _padded([_present(sample.rollout_logprobs) for sample in samples])
        reference = _padded([_present(sample.ref_logprobs) for sample in samples])
        token_rewards = token_rewards - config.kl_coef * kl_divergence(policy, reference, estimator=config.kl_estimator)
    group_ids = torch.tensor([sample.group for sample in samples])
    match config.advantage:
        case "grpo":
            advantages = grpo(token_rewards, loss_mask, group_ids, scale=config.advantage_scale or "std")
        case "rloo":
            advantages = rloo(token_rewards, loss_mask, group_ids)
    scored = [
        replace(sample, advantages=row[: len(sample.token_ids)])
        for sample, row in zip(samples, advantages, strict=True)
    ]
    return scored, group_metrics(token_rewards, loss_mask, group_ids)


def minibatches(samples: list[Sample], config: AlgorithmConfig, *, seed: int, step: int) -> Iterator[list[Sample]]:
    """num_epochs passes over the samples, each in num_minibatches parts of a new order."""
    if config.num_minibatches * config.num_epochs == 1:
        yield samples
        return
    generator = torch.Generator().manual_seed(hash((seed, step)) % 2**63)
    for _ in range(config.num_epochs):
        order = torch.randperm(len(samples), generator=generator)
        for part in order.tensor_split(config.num_minibatches):
            yield [samples[index] for index in part.tolist()]


def rollout_metrics(groups: list[RolloutGroup], *, mask_failed: bool = False) -> Metrics:
    """Rewards, their named parts, and the shape of the completions.

    Args:
        mask_failed: rewards that failed count in reward/failed alone.
    """
    all_failed = [failed for group in groups for failed in group.failed]
    all_rewards = [reward for group in groups for reward in group.rewards]
    kept = [reward for reward, failed in zip(all_rewards, all_failed, strict=True) if not (mask_failed and failed)]
    rewards = torch.tensor(kept or [0.0], dtype=torch.float64)
    completions = [completion for group in groups for completion in group.completions]
    lengths = [len(completion.token_ids) for completion in completions]
    metrics: Metrics = {
        "reward/mean": MetricValue.mean(float(rewards.sum()), len(rewards)),
        "reward/max": MetricValue.max(float(rewards.max())),
        "reward/failed": MetricValue.mean(sum(all_failed), len(all_failed)),
        "rollout/response_tokens": MetricValue.mean(sum(lengths), len(lengths)),
        "rollout/response_tokens_max": MetricValue.max(max(lengths)),
        "rollout/truncated": MetricValue.mean(sum(c.finish_reason == "length" for c in completions), len(completions)),
    }
    parts = [part for group in groups for part in group.reward_parts]
    for name in sorted({name for part in parts for name in part}):
        values = [part[name] for part in parts if name in part]
        metrics[f"reward_part/{name}"] = MetricValue.mean(sum(values), len(values))
    return metrics


def sample_rows(groups: list[RolloutGroup], step: int) -> list[Mapping[str, Any]]:
    """The first completions of a step as samples.jsonl keeps them."""
    rows = (
        {
            "step": step,
            "uid": group.example.uid,
            "data_source": group.example.data_source,
            "prompt": group.example.prompt,
            "completion": text,
            "ground_truth": group.example.ground_truth,
            "reward": reward,
            "reward_parts": parts,
            "reward_failed": failed,
            "finish_reason": completion.finish_reason,
            "policy_version": completion.policy_version,
            "token_ids": completion.token_ids,
            "logprobs": completion.logprobs,
        }
        for group in groups
        for completion, text, reward, parts, failed in zip(
            group.completions, group.texts, group.rewards, group.reward_parts, group.failed, strict=True
        )
    )
    return list(islice(rows, NUM_LOGGED_SAMPLES))


def _padded(rows: list[Tensor]) -> Tensor:
    return torch.nn.utils.rnn.pad_sequence(rows, batch_first=True)


def _present(values: Tensor | None) -> Tensor:
    assert values is not None
    return values
