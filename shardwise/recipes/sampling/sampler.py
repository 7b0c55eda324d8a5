"""Collects what a step of reinforcement learning trains on: draws prompts, has completions sampled and judged, and
replaces groups without a learning signal."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields, replace
from typing import Any, Self

from shardwise.config import DataError, Gdpo, Gigpo, ModelError, RLConfig
from shardwise.data import PromptStream
from shardwise.recipes.overlong import with_overlong_penalty
from shardwise.recipes.sampling.rollouter import Rollouter
from shardwise.recipes.sampling.sampled_tokens import num_spanned
from shardwise.recipes.sampling.samples import reward_columns, to_samples
from shardwise.rewards import is_correct
from shardwise.types import Completion, Example, Metrics, MetricValue, RolloutGroup, SampledSpan

FORMAT = 4
"""Format version of rollouts in checkpoints; increases when rollouts written before can no longer be read."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Rollout:
    """The judged completions of one step."""

    groups: list[RolloutGroup]
    greedy_rewards: list[float] | None
    """Reward of the greedy completion of each group's prompt, which algorithm.advantage=remax compares with; else
    None."""
    metrics: Metrics

    @property
    def oldest_version(self) -> int | None:
        """Oldest version of the policy that sampled a token; None if no token was sampled."""
        sampled = (completion for group in self.groups for completion in group.completions if completion.token_ids)
        return min((completion.policy_version for completion in sampled), default=None)

    def to_json(self) -> dict[str, Any]:
        """Returns it as JSON-serializable values, with the uid and the prompt of each row instead of the row. Lists of
        tokens are not copied."""
        return {
            "format": FORMAT,
            "groups": [
                _by_field(group)
                | {
                    "example": group.example.uid,
                    "completions": [
                        _by_field(completion) | {"spans": [asdict(span) for span in completion.spans]}
                        for completion in group.completions
                    ],
                    "row_prompt_ids": group.example.prompt_ids,
                }
                for group in self.groups
            ],
            "greedy_rewards": self.greedy_rewards,
            "metrics": {name: asdict(value) for name, value in self.metrics.items()},
        }

    @classmethod
    def from_json(cls, tree: dict[str, Any], examples: Sequence[Example]) -> Self:
        """Restores what `to_json` was called on; `examples` holds its rows.

        Raises:
            ModelError: it has another FORMAT. DataError: a row is gone, or has another name or prompt.
        """
        written = tree.get("format", 1)  # early versions wrote no format
        if written != FORMAT:
            raise ModelError(
                f"the checkpoint holds rollouts that were sampled ahead, in format {written}, and this version of "
                f"Shardwise reads {FORMAT}; resume it with the version that wrote it, or begin a new run from its "
                "weights (model.path=CHECKPOINT/hf, trainer.resume=never)"
            )
        if (uid := lost_row([tree], examples)) is not None:
            raise DataError(
                f"the checkpoint holds rollouts of the row {uid!r}, and the training rows have none of that name and "
                "prompt; the folder is a part of the name where two files are called alike; give data.train_files as "
                "they were, allow others with trainer.resume_allow=[data.train_files], or begin a new run from its "
                "weights (model.path=CHECKPOINT/hf, trainer.resume=never)"
            )
        by_uid = {example.uid: example for example in examples}

        def group_of(group: dict[str, Any]) -> RolloutGroup:
            completions = [
                Completion(**{**completion, "spans": [SampledSpan(**span) for span in completion["spans"]]})
                for completion in group["completions"]
            ]
            kept = {name: value for name, value in group.items() if name != "row_prompt_ids"}
            return RolloutGroup(**{**kept, "example": by_uid[group["example"]], "completions": completions})

        metrics = {name: MetricValue(**value) for name, value in tree["metrics"].items()}
        groups = [group_of(group) for group in tree["groups"]]
        return cls(groups=groups, greedy_rewards=tree["greedy_rewards"], metrics=metrics)

    @property
    def num_tokens(self) -> int:
        """Number of tokens in prompts and completions."""
        return sum(
            len(group.prompt_ids(completion)) + len(completion.token_ids)
            for group in self.groups
            for completion in group.completions
        )


def _by_field(instance: RolloutGroup | Completion) -> dict[str, Any]:
    return {field.name: getattr(instance, field.name) for field in fields(instance)}


def lost_row(rollouts: Sequence[dict[str, Any]], examples: Sequence[Example]) -> str | None:
    """Returns the uid of the first row in rollouts from `Rollout.to_json` that `examples` lack or have with another
    prompt; None if there is none."""
    prompts = {example.uid: example.prompt_ids for example in examples}
    for group in (group for rollout in rollouts for group in rollout["groups"]):
        uid = group["example"]
        if uid not in prompts or group.get("row_prompt_ids", prompts[uid]) != prompts[uid]:  # early ones have no prompt
            return str(uid)
    return None


class Sampler:
    """Draws prompts from the stream and asks the rollouter for their completions."""

    def __init__(
        self, rollouter: Rollouter, stream: PromptStream, examples: Sequence[Example], config: RLConfig
    ) -> None:
        self._rollouter = rollouter
        self._stream = stream
        self.examples = examples
        self._config = config

    def collect(self, step: int) -> Rollout:
        """Collects the groups of a step: rollout.num_prompts of them, or fewer if rollout.dynamic_sampling ran out of
        rounds; if no round found a group with a learning signal, those of the last round. reward.max_failure_rate is
        checked against all rounds so far, because every call of a small late round may fail."""
        rollout = self._config.rollout
        with self._rollouter.counting_failures(rollout.num_prompts * rollout.group_size):  # the first round
            return self._collect(step)

    def _collect(self, step: int) -> Rollout:
        dynamic, num_prompts = self._config.rollout.dynamic_sampling, self._config.rollout.num_prompts
        max_rounds = 1 if dynamic is None else dynamic.max_rounds
        kept: list[RolloutGroup] = []
        sampled: list[RolloutGroup] = []
        num_rounds, num_tokens_before = 0, self._rollouter.num_sampled_tokens
        while len(kept) < num_prompts and num_rounds < max_rounds:
            groups = self._sample(num_prompts - len(kept), step=step, round=num_rounds)
            num_rounds += 1
            sampled += groups
            kept += groups if dynamic is None else filter(self._teaches, groups)
        num_missing = num_prompts - len(kept)
        kept = kept or groups
        metrics: Metrics = {}
        if dynamic is not None:
            metrics = {
                "rollout/num_rounds": MetricValue.max(num_rounds),
                "rollout/num_dropped_groups": MetricValue.sum(len(sampled) - len(kept)),
                "rollout/num_missing_groups": MetricValue.sum(num_missing),
                **self._sampled_metrics(sampled),
            }
        num_tokens = self._rollouter.num_sampled_tokens - num_tokens_before
        num_kept = sum(num_spanned(completion) for group in kept for completion in group.completions)
        metrics |= {
            "tokens/sampled": MetricValue.sum(num_tokens),
            "tokens/dropped": MetricValue.sum(num_tokens - num_kept),
        }
        if self._config.algorithm.advantage.name != "remax":
            return Rollout(groups=kept, greedy_rewards=None, metrics=metrics)
        greedy = self._greedy(kept, step)
        if self._config.masks_failed:  # without a baseline a group is left out as a whole
            pairs = zip(kept, greedy, strict=True)
            kept = [replace(g, has_baseline=not base.failed[0]) for g, base in pairs]
        return Rollout(groups=kept, greedy_rewards=self._rewards_of(greedy), metrics=metrics)

    def _sample(self, num_prompts: int, *, step: int, round: int) -> list[RolloutGroup]:
        rows = self._stream.take(num_prompts, step=step)
        groups = self._rollouter.collect(
            [self.examples[row] for row in rows],
            num_completions=self._config.rollout.group_size,
            temperature=self._config.rollout.temperature,
            seed=self._config.trainer.seed,
            stream=f"step {step}" if round == 0 else f"step {step} round {round}",
            with_experts=self._config.rollout.router_replay,
        )
        for row, group in zip(rows, groups, strict=True):
            verdicts = [verdict for verdict in self._verdicts(group) if verdict is not None]
            if verdicts:
                self._stream.record(row, sum(verdicts) / len(verdicts))
        return groups

    def _sampled_metrics(self, sampled: Sequence[RolloutGroup]) -> Metrics:
        """Returns metrics over all rounds, since groups that are kept are neither the easy nor the hard ones."""
        masks = self._config.masks_failed
        rewards = [r for g in sampled for r, failed in zip(g.rewards, g.failed, strict=True) if not (masks and failed)]
        verdicts = [verdict for group in sampled for verdict in self._verdicts(group) if verdict is not None]
        return {
            "rollout/sampled_reward": MetricValue.mean(sum(rewards), len(rewards)),
            "rollout/sampled_accuracy": MetricValue.mean(sum(verdicts), len(verdicts)),
        }

    def _verdicts(self, group: RolloutGroup) -> list[bool | None]:
        """Returns whether each completion is correct; None if it was not judged or its reward failed, which says
        nothing about the prompt."""
        reward = self._config.reward
        if reward is None:
            return [None] * len(group.rewards)
        judged = zip(group.rewards, group.reward_parts, group.failed, strict=True)
        return [None if failed else is_correct(r, parts, reward) for r, parts, failed in judged]

    def _teaches(self, group: RolloutGroup) -> bool:
        """Returns whether completions differ in what rollout.dynamic_sampling.by names. With gdpo, which compares each
        function on its own, the rewards of some function must differ; with gigpo, which discounts by turns, a
        different number of turns also counts."""
        dynamic = self._config.rollout.dynamic_sampling
        if dynamic is not None and dynamic.by == "correct":
            return len({verdict for verdict in self._verdicts(group) if verdict is not None}) > 1
        masks = self._config.masks_failed
        kept = [place for place, failed in enumerate(group.failed) if not (masks and failed)]
        columns: list[Sequence[float]] = [group.rewards]
        match self._config.algorithm.advantage:
            case Gdpo() if self._config.reward is not None:
                idle = {entry.name for entry in self._config.reward.functions if entry.weight == 0}
                parts = reward_columns([group], self._config.reward)
                columns = [scores for name, scores in parts.items() if name not in idle]
            case Gigpo(gamma=gamma) if gamma < 1 and any(group.rewards):
                columns.append([completion.num_turns for completion in group.completions])
        return any(len({column[place] for place in kept}) > 1 for column in columns)

    def _greedy(self, groups: Sequence[RolloutGroup], step: int) -> list[RolloutGroup]:
        """Samples the greedy completion of each group's prompt, judged."""
        return self._rollouter.collect(
            [group.example for group in groups],
            num_completions=1,
            temperature=0.0,
            seed=self._config.trainer.seed,
            stream=f"step {step} greedy",
        )

    def _rewards_of(self, greedy: list[RolloutGroup]) -> list[float]:
        """Returns the rewards of greedy completions, with the penalty for overlong ones like those they are compared
        with."""
        max_tokens = self._config.rollout.max_response_tokens
        samples = with_overlong_penalty(to_samples(greedy), self._config.algorithm, max_tokens=max_tokens)
        return [sample.reward for sample in samples]
