"""Trained reward models as engines on the trainer's ranks: the entries of reward.functions with type model."""

from collections.abc import Collection, Iterator, Sequence

import torch
from transformers import PreTrainedTokenizerBase

from shardwise.config import ModelReward, RewardConfig
from shardwise.controller.base import WorkerGroup
from shardwise.data import render_response_sample
from shardwise.recipes.engine_source import EngineSource
from shardwise.recipes.engines import RemoteEngine, build_engine
from shardwise.recipes.opened_model import open_model
from shardwise.rewards import Answer, RewardJob
from shardwise.types import Sample


class ModelScorer:
    """Scores conversations with a reward model, rendered by its own tokenizer."""

    def __init__(
        self,
        engine: RemoteEngine,
        tokenizer: PreTrainedTokenizerBase,
        context_tokens: int | None,
        media_token_ids: Collection[int] = (),
    ) -> None:
        """

        Args:
            context_tokens: the longest sequence the model was made for; None where it sets no limit.
            media_token_ids: tokens that stand for parts of images and videos, which the model is never shown.
        """
        self.engine = engine
        self._tokenizer = tokenizer
        self._context_tokens = context_tokens
        self._media_token_ids = frozenset(media_token_ids)

    def score(self, jobs: Sequence[RewardJob]) -> Iterator[tuple[int, Answer]]:
        """Yields (index of the job, answer) for every job. A job that is too long for a micro-batch or the model's
        context, or whose text spells a token that stands for images, gets a failure as its answer."""
        samples = [self._render(job) for job in jobs]
        failures = [self._failure(sample.token_ids.tolist()) for sample in samples]
        scored = [place for place, failure in enumerate(failures) if failure is None]
        scores = self.engine.score([samples[place] for place in scored])
        found = {place: float(values.sum()) for place, values in zip(scored, scores, strict=True)}
        for place, failure in enumerate(failures):
            yield place, Answer(score=found[place]) if failure is None else Answer(failure=failure)

    def _failure(self, token_ids: list[int]) -> str | None:
        """Returns why the sequence cannot be scored; None if it can."""
        cap = self.engine.source.layout.max_tokens_per_micro_batch
        cap = cap if self._context_tokens is None else min(cap, self._context_tokens)
        if len(token_ids) > cap:
            limits = "engine.max_tokens_per_micro_batch and the reward model's context"
            return f"{len(token_ids)} tokens, more than the {cap} of {limits}"
        if spelt := self._media_token_ids.intersection(token_ids):
            token = self._tokenizer.decode([min(spelt)])
            return f"the text spells {token!r}, by which the reward model knows an image or a video, and is shown none"
        return None

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
    """Builds the reward models of a run. Returns entry name -> scorer."""
    scorers = {}
    for entry in config.functions:
        if isinstance(entry, ModelReward):
            model = open_model(entry.classifier)
            source = EngineSource(
                model=model.config,
                layout=entry.engine,
                head="sequence_scores",
                pad_token_id=model.tokenizer.pad_token_id,
            )
            engine = build_engine(group, f"reward {entry.name}", source)
            scorers[entry.name] = ModelScorer(engine, model.tokenizer, model.context.num_tokens, model.media_token_ids)
    return scorers
