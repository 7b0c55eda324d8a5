"""From prompts to judged completions, for reinforcement learning and evaluation."""

import math
from collections.abc import Collection, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from itertools import groupby
from typing import Self

from transformers import PreTrainedTokenizerBase

from shardwise.config import (
    AgentEnvironment,
    CustomEnvironment,
    SamplingConfig,
    ToolsEnvironment,
    TrainingError,
)
from shardwise.controller.base import WorkerGroup
from shardwise.data.images import file_of
from shardwise.fault_plan import fault_point
from shardwise.recipes.sampling.agents import Agents
from shardwise.recipes.sampling.environment import load_agent, load_environment
from shardwise.recipes.sampling.episodes import Episode, Episodes
from shardwise.recipes.sampling.sync_gate import SyncGate
from shardwise.rewards import CustomRewards, RewardJob, RewardResult, Rewards
from shardwise.types import Completion, Example, GenerateRequest, RolloutGroup


class Rollouter:
    """Asks the ranks' rollout engines for completions and the rewards for scores. A context manager."""

    def __init__(
        self,
        group: WorkerGroup,
        tokenizer: PreTrainedTokenizerBase,
        config: SamplingConfig,
        rewards: Rewards | CustomRewards | None,
        *,
        max_prompt_tokens: int,
        media_token_ids: Collection[int] = (),
        sync_gate: SyncGate | None = None,
    ) -> None:
        """
        Args:
            rewards: None judges nothing; every reward is 0.
            max_prompt_tokens: longest prompt that agents may write.
            media_token_ids: tokens that environments and agents may not bring in.
            sync_gate: lets new weights in between two calls of the engines, or interrupts a call for them; None:
                nothing interrupts.
        Raises:
            ConfigError: rollout.environment cannot be used.
        """
        self._group = group
        self._tokenizer = tokenizer
        self._config = config
        self._rewards = rewards
        self._sync_gate = sync_gate
        self.num_sampled_tokens = 0
        """Tokens that engines have sampled so far, in all calls."""
        self._episodes: Episodes | Agents | None = None
        match config.environment:
            case AgentEnvironment() as agents:
                self._episodes = Agents(
                    agents,
                    load_agent(agents),
                    tokenizer,
                    self._generate,
                    max_prompt_tokens=max_prompt_tokens,
                    media_token_ids=media_token_ids,
                )
            case CustomEnvironment() | ToolsEnvironment() as environment:
                self._episodes = Episodes(
                    environment,
                    load_environment(environment),
                    tokenizer,
                    self._generate,
                    media_token_ids=media_token_ids,
                )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        if self._episodes is not None:
            self._episodes.__exit__(*exception)

    def collect(
        self,
        examples: Sequence[Example],
        *,
        num_completions: int,
        temperature: float,
        seed: int,
        stream: str,
        with_experts: bool = False,
    ) -> list[RolloutGroup]:
        """Returns one group of judged completions for each example, in order.

        Args:
            seed, stream: together with the row and the completion's index they determine the random draws.
            with_experts: records which experts every token goes to.
        """
        requests = [
            GenerateRequest(
                uid=f"{stream}/{index}/{example.uid}",
                prompt_ids=example.prompt_ids,
                num_completions=num_completions,
                max_tokens=self._config.max_response_tokens,
                temperature=temperature,
                top_k=self._config.top_k,
                top_p=self._config.top_p,
                min_p=self._config.min_p,
                stop=self._config.stop,
                seed=seed,
                prefix_key=index,
                with_experts=with_experts,
                image_refs=example.image_refs,
            )
            for index, example in enumerate(examples)
        ]
        groups = self._play(examples, requests)
        results = self._judge(groups)
        judged_groups = [
            RolloutGroup(
                example=example,
                completions=[episode.completion for episode in group],
                texts=[self._text(episode) for episode in group],
                answers=[episode.last_turn for episode in group],
                rewards=[result.score for result in judged],
                reward_parts=[result.parts for result in judged],
                failures=[result.failure for result in judged],
            )
            for example, group, judged in zip(examples, groups, results, strict=True)
        ]
        if self._rewards is not None:
            fault_point("reward", judged_groups[0].rewards)
        return judged_groups

    def _play(self, examples: Sequence[Example], requests: list[GenerateRequest]) -> list[list[Episode]]:
        """Plays the episodes of every example: of one turn, or of as many as the environment asks for."""
        if self._episodes is not None:
            return self._episodes.play(examples, requests)
        groups = [
            [Episode(example, completion) for completion in group]
            for example, group in zip(examples, self._generate(requests), strict=True)
        ]
        for group in groups:
            for episode in group:
                episode.turns.append(self._text(episode))
        return groups

    def prompt_text(self, example: Example, completion: Completion) -> str:
        """Returns the prompt that a completion answers: the row's, unless an agent wrote another."""
        return example.prompt if completion.prompt_ids is None else self._tokenizer.decode(completion.prompt_ids)

    def _text(self, episode: Episode) -> str:
        """All that was sampled and observed. Without an environment this is the one turn, which was decoded before."""
        if self._episodes is None and episode.turns:
            return episode.last_turn
        return self._tokenizer.decode(episode.completion.token_ids, skip_special_tokens=True)

    def counting_failures(self, min_completions: int) -> AbstractContextManager[None]:
        """Inside, all calls of `collect` are one batch for reward.max_failure_rate, of at least `min_completions`."""
        return nullcontext() if self._rewards is None else self._rewards.counting_failures(min_completions)

    def _generate(self, requests: list[GenerateRequest]) -> list[list[Completion]]:
        """Generates completions, and continues those that new weights have interrupted until all are finished."""
        groups = self._call_engines(requests)
        while rest := [
            (place, part) for place, request in enumerate(requests) for part in rest_of(request, groups[place])
        ]:
            for (place, part), more in zip(rest, self._call_engines([part for _, part in rest]), strict=True):
                for index, completion in enumerate(more, start=part.first_index):
                    groups[place][index] = groups[place][index].then(completion)
        return groups

    def _call_engines(self, requests: list[GenerateRequest]) -> list[list[Completion]]:
        """Deals requests to the engines round-robin, so that neighbors of similar length spread evenly; by their
        `prefix_key` if engines cache prefixes."""
        size = self._group.size // self._config.engine.ranks_per_engine
        keys = [
            request.prefix_key if self._config.engine.keeps_prefixes else place
            for place, request in enumerate(requests)
        ]
        places = [[place for place, key in enumerate(keys) if key % size == engine] for engine in range(size)]
        with nullcontext() if self._sync_gate is None else self._sync_gate.sampling():
            shards = self._group.scatter("generate", [[requests[place] for place in shard] for shard in places])
        found = {
            place: group
            for shard, groups in zip(places, shards, strict=True)
            for place, group in zip(shard, groups, strict=True)
        }
        groups = [found[place] for place in range(len(requests))]
        for request, completions in zip(requests, groups, strict=True):
            _require_numbers(request, completions)
            self.num_sampled_tokens += sum(len(completion.token_ids) for completion in completions)
        return groups

    def _judge(self, groups: list[list[Episode]]) -> list[list[RewardResult]]:
        episodes = [episode for group in groups for episode in group]
        if self._rewards is None:
            _require_whole(episodes)
            return [[RewardResult(score=0.0) for _ in group] for group in groups]
        results = iter(self._rewards.score([job for group in groups for job in self._jobs(group)]))
        return [[next(results) for _ in group] for group in groups]

    def _jobs(self, group: list[Episode]) -> list[RewardJob]:
        """Makes the jobs that judge the episodes of one example, which share its images."""
        images = [file_of(image_ref) for image_ref in group[0].example.image_refs]
        return [self._job(episode, images) for episode in group]

    def _job(self, episode: Episode, images: list[str | bytes]) -> RewardJob:
        """Makes the job that judges an episode's last turn; everything before it belongs to the prompt."""
        example = episode.example
        extra_info = {**example.extra_info, "num_response_tokens": len(episode.completion.token_ids)}
        return RewardJob(
            uid=example.uid,
            prompt=self.prompt_text(example, episode.completion) + self._tokenizer.decode(episode.ids_before_last_turn),
            messages=None if example.messages is None else example.messages + episode.said[:-1],
            images=images,
            data_source=example.data_source,
            solution_str=episode.last_turn,
            ground_truth=example.ground_truth,
            extra_info=extra_info if episode.outcome is None else extra_info | {"turns": episode.turns},
            outcome=episode.outcome,
        )


def rest_of(request: GenerateRequest, completions: Sequence[Completion]) -> list[GenerateRequest]:
    """Returns requests that continue the interrupted completions of a request. Completions without a token stay
    together in runs of consecutive indices, so that each run shares one prefill."""
    interrupted = [index for index, one in enumerate(completions) if one.finish_reason == "interrupted"]
    begun = [index for index in interrupted if completions[index].token_ids]
    parts = [
        replace(
            request,
            num_completions=1,
            first_index=index,
            partial_token_ids=completions[index].token_ids,
            max_tokens=request.max_tokens - len(completions[index].token_ids),
        )
        for index in begun
    ]
    waiting = [index for index in interrupted if not completions[index].token_ids]
    for _, neighbours in groupby(enumerate(waiting), key=lambda pair: pair[1] - pair[0]):
        (_, first), *others = neighbours
        parts.append(replace(request, num_completions=1 + len(others), first_index=first))
    return parts


def _require_numbers(request: GenerateRequest, completions: Sequence[Completion]) -> None:
    """Raises TrainingError if a logprob is NaN, from any engine; names the completion. A correction of rollout logprobs
    would silently mask such a token."""
    for index, completion in enumerate(completions, start=request.first_index):
        if math.isnan(sum(completion.logprobs)):
            raise TrainingError(
                f"completion {index} of {request.uid} has a logprob that is no number: the rollout engine's weights or "
                "activations have overflowed (engine.param_dtype=float16 does so first; bfloat16 and float32 reach "
                "further)"
            )


def _require_whole(episodes: Sequence[Episode]) -> None:
    """Raises TrainingError: an environment failed, and there is no reward whose on_failure says what to do."""
    failed = [(e.example.uid, e.outcome.failure) for e in episodes if e.outcome is not None and e.outcome.failure]
    if failed:
        uid, failure = failed[0]
        raise TrainingError(
            f"the environment failed for row {uid}: {failure}. Fix it, or give a reward, whose on_failure=mask "
            "leaves such rows out"
        )
