"""The training half of an RL step: old and reference logprobs, values, advantages, then the optimizer steps."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from shardwise.algorithms import adaptive_kl_coef, derived_mismatch_metrics
from shardwise.config import AdaptiveKl, AlgorithmConfig, Custom, KlController, RLConfig, TrainingError
from shardwise.config.algorithm import BATCH_ADVANTAGES
from shardwise.console import warn
from shardwise.observability import Spans
from shardwise.recipes.advantages import Scored, with_advantages
from shardwise.recipes.custom import CustomFunction
from shardwise.recipes.engines import EMPTY_STEPS, RemoteEngine
from shardwise.recipes.overlong import with_overlong_penalty
from shardwise.recipes.rollout_correction import with_rollout_correction
from shardwise.recipes.sample_fields import present, with_field
from shardwise.recipes.sampling.sampled_tokens import token_metrics
from shardwise.recipes.sampling.sampler import Rollout
from shardwise.recipes.sampling.samples import reward_columns, to_samples
from shardwise.recipes.token_selection import with_selection
from shardwise.types import Metrics, MetricValue, Sample, merge_metrics


@dataclass(slots=True)
class Engines:
    """The models of a run, on the same ranks."""

    policy: RemoteEngine
    reference: RemoteEngine | None = None
    """None if no KL term needs one, or if it is the policy without its adapters."""
    critic: RemoteEngine | None = None
    teachers: dict[str | None, RemoteEngine] = field(default_factory=dict)
    """Data source -> its teacher; that under None teaches all other sources."""

    @property
    def saved(self) -> dict[str, RemoteEngine]:
        """The engines that checkpoints hold, by subfolder."""
        return {"": self.policy} | ({} if self.critic is None else {"critic": self.critic})

    @property
    def frozen(self) -> list[RemoteEngine]:
        """The engines that are not trained."""
        return [*([] if self.reference is None else [self.reference]), *self.teachers.values()]


PATIENCE_STEPS = 10
"""Consecutive steps without a learning signal after which a warning is printed."""


class Learner:
    """Turns rollouts into optimizer steps of the policy, and of the critic where there is one."""

    def __init__(self, engines: Engines, config: RLConfig) -> None:
        self._engines = engines
        self._config = config
        self._algorithm = config.algorithm
        self.kl_coef = config.algorithm.kl_coef
        """The weight of the KL term now; algorithm.kl_controller changes it."""
        self._num_idle_steps = 0

    def state_dict(self) -> dict[str, Any]:
        """Returns what it keeps from step to step beside the engines, JSON-serializable."""
        return {"kl_coef": self.kl_coef, "num_idle_steps": self._num_idle_steps}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continues from where the learner that gave the state was."""
        self._num_idle_steps = state["num_idle_steps"]
        if self._algorithm.kl_controller.name != "fixed":  # else the config sets it
            self._set_kl_coef(state["kl_coef"])

    def learn(self, rollout: Rollout, step: int, spans: Spans) -> Metrics:
        """Makes all optimizer steps of a step of the run."""
        algorithm = self._algorithm
        samples = to_samples(rollout.groups, mask_failed=self._config.masks_failed)
        samples = with_overlong_penalty(samples, algorithm, max_tokens=self._config.rollout.max_response_tokens)
        with spans("logprobs"):
            scored = self._score(samples, rollout)
            replayed = self._replay_metrics(samples, step)
        samples, metrics = with_advantages(scored, algorithm, kl_coef=self.kl_coef)
        metrics |= replayed
        samples, corrected = with_rollout_correction(samples, algorithm)
        self._warn_of_idle_steps(samples)
        metrics |= corrected | token_metrics(rollout.groups, samples)
        seed = self._config.trainer.seed
        batches = minibatches(samples, algorithm, seed=seed, step=step)
        with spans("train"):
            updates = [
                self._update(batch, step, seed=hash((seed, step, number)) % 2**63)
                for number, batch in enumerate(batches)
            ]
        num_on_policy = 1 + next((n for n, found in enumerate(updates) if EMPTY_STEPS not in found), 0)
        metrics |= merge_metrics([*updates[:num_on_policy], *map(_without_mismatch, updates[num_on_policy:])])
        if "rollout/ratio" in metrics:
            metrics |= derived_mismatch_metrics(metrics)
        return metrics | self._adapt_kl_coef(metrics, len(samples))

    def _warn_of_idle_steps(self, samples: Sequence[Sample]) -> None:
        """Warns if nothing was learned for many steps: all rewards were equal, or no token was left to train."""
        name = self._algorithm.advantage.name
        has_tokens = any(sample.loss_mask.any() for sample in samples)
        is_idle = not any(present(sample.advantages)[sample.loss_mask].any() for sample in samples)
        # Whitening, values and a discount give advantages even if all rewards are equal.
        is_idle |= name in BATCH_ADVANTAGES and len({sample.reward for sample in samples}) <= 1
        self._num_idle_steps = self._num_idle_steps + 1 if is_idle else 0
        if self._num_idle_steps and self._num_idle_steps % PATIENCE_STEPS == 0:
            compared = (
                "of a step" if name in BATCH_ADVANTAGES else "of every group (advantage/zero_variance_fraction = 1)"
            )
            cause = (
                f"the rewards have been all equal, {compared}; look at samples.jsonl, at the reward function, and at "
                "whether the prompts are far too easy or too hard"
                if has_tokens
                else "nothing could be learnt, and in this one rollout_correction.rejection or failed rewards (masked) "
                "have left no token; look at rollout/rejected_sequence_fraction and reward/failed"
            )
            warn(f"no learning signal: for {self._num_idle_steps} steps {cause}")

    def _score(self, samples: list[Sample], rollout: Rollout) -> Scored:
        """Adds what this algorithm needs: old logprobs if the policy changes before the last optimizer step on a
        sample, reference logprobs if there is a KL term, values if there is a critic."""
        engines, algorithm = self._engines, self._algorithm
        if algorithm.rollout_correction.bypass:
            samples = [replace(sample, old_logprobs=sample.rollout_logprobs) for sample in samples]
        elif algorithm.needs_old_logprobs:
            samples = with_field(samples, "old_logprobs", engines.policy.score(samples))
        if algorithm.kl_coef > 0:
            is_policy = engines.reference is None
            reference = engines.policy if engines.reference is None else engines.reference
            scores = reference.score(without_experts(samples), with_adapters=not is_policy)
            samples = with_field(samples, "ref_logprobs", scores)
        if engines.critic is not None:
            samples = with_field(samples, "values", engines.critic.score(without_experts(samples)))
        greedy, reward = rollout.greedy_rewards, self._config.reward
        parts = {} if reward is None else reward_columns(rollout.groups, reward)
        if algorithm.advantage.name == "gdpo" and not parts and not all(all(g.failed) for g in rollout.groups):
            raise TrainingError(
                "algorithm.advantage=gdpo compares the parts of the reward, and the results of reward.manager have "
                "none in common; let it return the same keys for every completion, or choose another advantage"
            )
        return Scored(
            samples=samples,
            reward_parts=parts,
            reward_weights={} if reward is None else {entry.name: entry.weight for entry in reward.functions},
            outcome_rewards=[reward for group in rollout.groups for reward in group.rewards],
            greedy_rewards=None if greedy is None else [greedy[sample.group] for sample in samples],
            teacher_logprobs=self._teacher_logprobs(samples, rollout) if engines.teachers else None,
        )

    def _replay_metrics(self, samples: Sequence[Sample], step: int) -> Metrics:
        """Measures how far the policy's logprobs are from the rollout's, once with routers that choose experts
        themselves and once with routers that replay the rollout's choice. Takes two passes, as often as the engine is
        probed."""
        every = self._config.rollout.probe_every_syncs
        if not self._config.rollout.router_replay or not every or (step - 1) % every:
            return {}
        trained = torch.cat([sample.loss_mask for sample in samples])
        rollout = torch.cat([present(sample.rollout_logprobs) for sample in samples])
        found: Metrics = {}
        for name, scored in {"own": without_experts(samples), "replayed": list(samples)}.items():
            apart = (torch.cat(self._engines.policy.score(scored)) - rollout).abs()[trained]
            found[f"rollout/difference_{name}_experts"] = MetricValue.mean(float(apart.double().sum()), len(apart))
        return found

    def _teacher_logprobs(self, samples: Sequence[Sample], rollout: Rollout) -> list[Tensor]:
        """Returns the logprobs of each sample under the teacher of its source."""
        teachers = self._engines.teachers
        sources = [rollout.groups[sample.group].example.data_source for sample in samples]
        found: dict[int, Tensor] = {}
        for name, teacher in teachers.items():
            places = [n for n, source in enumerate(sources) if (source if source in teachers else None) == name]
            if places:
                taught = without_experts([samples[place] for place in places])
                found |= zip(places, teacher.score(taught), strict=True)
        return [found[place] for place in range(len(samples))]

    def _update(self, samples: Sequence[Sample], step: int, *, seed: int) -> Metrics:
        """Makes one optimizer step of every model that learns."""
        metrics: Metrics = {}
        if self._engines.critic is not None:
            learned = self._engines.critic.train(without_experts(samples))
            metrics = {
                f"critic/{name.removeprefix('train/')}" if name.startswith("train/") else name: value
                for name, value in learned.items()
            }
        if self._policy_learns(step):
            selected = with_selection(samples, self._algorithm, seed=seed)
            metrics |= self._engines.policy.train(selected)
        return metrics

    def _policy_learns(self, step: int) -> bool:
        critic = self._config.critic
        return critic is None or step > critic.critic_warmup_steps

    def _adapt_kl_coef(self, metrics: Metrics, num_samples: int) -> Metrics:
        """Lets the controller change the weight of the KL term, and updates the policy's loss."""
        if self._algorithm.kl_coef == 0:
            return {}
        used = self.kl_coef
        kl = metrics.get("policy/ref_kl")
        if self._algorithm.kl_controller.name != "fixed" and kl is not None and kl.host().count:
            self._set_kl_coef(_next_kl_coef(self._algorithm.kl_controller, used, kl.result(), num_samples))
        return {"policy/kl_coef": MetricValue.max(used)}

    def _set_kl_coef(self, kl_coef: float) -> None:
        self.kl_coef = kl_coef
        self._engines.policy.use_loss("policy", self._algorithm, kl_coef=kl_coef)


def _without_mismatch(metrics: Metrics) -> Metrics:
    """Returns the metrics of a later optimizer step without those that compare with the rollout: the policy is no
    longer the one that sampled."""
    return {
        name: value for name, value in metrics.items() if not name.startswith("rollout/") and name != "policy/logprob"
    }


def _next_kl_coef(controller: KlController, kl_coef: float, kl: float, num_samples: int) -> float:
    match controller:
        case AdaptiveKl():
            target, horizon = controller.target, controller.horizon
            return adaptive_kl_coef(kl_coef, kl, target=target, horizon=horizon, num_samples=num_samples)
        case Custom():
            own = CustomFunction.load(controller, key="algorithm.kl_controller")
            return own.number(own(kl_coef, kl, num_samples), meaning="the next kl_coef")
        case _:
            return kl_coef


def minibatches(samples: list[Sample], config: AlgorithmConfig, *, seed: int, step: int) -> Iterator[list[Sample]]:
    """Yields num_epochs passes over the samples, each in a new order and num_minibatches parts; in fewer if there are
    fewer samples than parts."""
    if config.num_updates == 1:
        yield samples
        return
    generator = torch.Generator().manual_seed(hash((seed, step)) % 2**63)
    for _ in range(config.num_epochs):
        order = torch.randperm(len(samples), generator=generator)
        for part in order.tensor_split(min(config.num_minibatches, len(samples))):
            yield [samples[index] for index in part.tolist()]


def without_experts(samples: Sequence[Sample]) -> list[Sample]:
    """Removes the recorded expert choices: router replay is for the policy alone, other models route for themselves."""
    return [replace(sample, experts=None) for sample in samples]
