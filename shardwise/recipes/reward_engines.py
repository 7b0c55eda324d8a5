"""Trained reward models as engines on the trainer's ranks: the entries of reward.functions with type model."""

from collections.abc import Iterator, Sequence

import torch
from transformers import PreTrainedTokenizerBase

from shardwise.config import ModelReward, RewardConfig
from shardwise.controller.base import WorkerGroup
from shardwise.data import render_response_sample
from shardwise.recipes.build import open_model
from shardwise.recipes.engines import RemoteEngine, build_engine
from shardwise.rewards import Answer, RewardJob
from shardwise.types import Sample


class ModelScorer:
    """Scores conversations with a reward model, rendered by its own tokenizer."""

    def __init__(self, engine: RemoteEngine, tokenizer: PreTrainedTokenizerBase, context_tokens: int | None) -> None:
        """Around an engine that is built.

        Args:
            context_tokens: the longest sequence the model was made for; None where it sets no limit.
        """
        self.engine = engine
        self._tokenizer = tokenizer
        self._context_tokens = context_tokens

    def score(self, jobs: Sequence[RewardJob]) -> Iterator[tuple[int, Answer]]:
        """(place of the job, answer) of every job; one that is too long for a micro-batch or the model's context is
        a failure."""
        cap = self.engine.layout.max_tokens_per_micro_batch
        cap = cap if self._context_tokens is None else min(cap, self._context_tokens)
        samples = [self._render(job) for job in jobs]
        fitting = [place for place, sample in enumerate(samples) if len(sample.token_ids) <= cap]
        scores = self.engine.score([samples[place] for place in fitting])
        found = {place: float(values.sum()) for place, values in zip(fitting, scores, strict=True)}
        for place, sample in enumerate(samples):
            if place in found:
                yield place, Answer(score=found[place])
            else:
                too_long = f"{len(sample.token_ids)} tokens, more than the {cap} of"
                limits = "engine.max_tokens_per_micro_batch and the reward model's context"
                yield place, Answer(failure=f"{too_long} {limits}")

    def _render(self, job: RewardJob) -> Sample:
        token_ids, loss_mask = render_response_sample(
            self._tokenizer,
            job.prompt if job.messages is None else job.messages,
            job.solution_str,
            apply_chat_template=job.messages is not None,
            system_prompt=None,
            origin=job.uid,
        )
        return Sample(uid=job.uid, token_ids=torch.tensor(token_ids), loss_mask=torch.tensor(loss_mask))


def build_reward_engines(config: RewardConfig, group: WorkerGroup) -> dict[str, ModelScorer]:
    """The reward models of a run, by the names of their entries."""
    scorers = {}
    for entry in config.functions:
        if isinstance(entry, ModelReward):
            model = open_model(entry.classifier)
            engine = build_engine(
                group,
                f"reward {entry.name}",
                model.config,
                entry.engine,
                head="sequence_scores",
                pad_token_id=model.tokenizer.pad_token_id,
            )
            scorers[entry.name] = ModelScorer(engine, model.tokenizer, model.context_tokens)
    return scorers
