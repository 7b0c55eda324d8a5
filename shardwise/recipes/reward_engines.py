"""Trained reward models as engines on the trainer's ranks: the entries of reward.functions with type model."""

from collections.abc import Collection, Iterator, Sequence
from typing import Any

from transformers import PreTrainedTokenizerBase

from shardwise.config import DataError, ModelError, ModelReward, RewardConfig
from shardwise.controller.base import WorkerGroup
from shardwise.data import Row, UnusableProcessor, Vision, WordsAlone, render_response_sample
from shardwise.data.rows import make_sample, reading, unshown_ids
from shardwise.data.template_forms import joined
from shardwise.recipes.engine_source import EngineSource
from shardwise.recipes.engines import RemoteEngine, build_engine
from shardwise.recipes.opened_model import open_model
from shardwise.rewards import Answer, RewardJob
from shardwise.types import Example, ImageRef, Sample

_COLUMN = "images"
"""Where the images of a job are, in the row that it becomes."""


class ModelScorer:
    """Scores conversations with a reward model, rendered by its own tokenizer, with images if it sees them."""

    def __init__(
        self,
        engine: RemoteEngine,
        tokenizer: PreTrainedTokenizerBase,
        context_tokens: int | None,
        media_token_ids: Collection[int] = (),
        *,
        vision: Vision | None = None,
        shown_by: Vision | None = None,
    ) -> None:
        """
        Args:
            context_tokens: the longest sequence the model was made for; None where it sets no limit.
            media_token_ids: tokens that stand for parts of images and videos, which no text may spell.
            vision: how the model is shown images; None if it sees none. Of a family that is shown none it reads words;
                with an image processor that cannot be used it fails where there are images.
            shown_by: how the policy is shown images. What its template writes for one, a model of words reads.
        """
        self.engine = engine
        self._tokenizer = tokenizer
        self._context_tokens = context_tokens
        self._media_token_ids = frozenset(media_token_ids)
        reads_words = isinstance(vision, WordsAlone) and not isinstance(vision, UnusableProcessor)
        self._vision = None if reads_words else vision
        self._shown_by = shown_by

    def score(self, jobs: Sequence[RewardJob]) -> Iterator[tuple[int, Answer]]:
        """Yields (index of the job, answer) for every job. A job that is too long for a micro-batch or the model's
        context, whose text spells a token that stands for images, or whose images the model cannot be shown, gets a
        failure as its answer."""
        samples = [self._sample(job) for job in jobs]
        scored = {place: sample for place, sample in enumerate(samples) if isinstance(sample, Sample)}
        scores = self.engine.score(list(scored.values()))
        found = {place: float(values.sum()) for place, values in zip(scored, scores, strict=True)}
        for place, sample in enumerate(samples):
            yield place, Answer(failure=sample) if isinstance(sample, str) else Answer(score=found[place])

    def _sample(self, job: RewardJob) -> Sample | str:
        """Returns what the model scores, or why it cannot."""
        try:
            messages, image_refs = self._shown(job)
        except DataError as error:  # its image processor may refuse what the policy's takes
            return str(error)
        vision = self._vision if image_refs else None
        rendered = render_response_sample(
            self._tokenizer,
            job.prompt if messages is None else messages,
            job.solution_str,
            apply_chat_template=messages is not None,
            system_prompt=None,
            origin=job.uid,
            as_read=reading(vision),
        )
        if spelt := set(unshown_ids(self._media_token_ids, vision)).intersection(rendered[0]):
            token = self._tokenizer.decode([min(spelt)])
            return f"the text spells {token!r}, by which the reward model knows an image or a video, and is shown none"
        if vision is not None:
            try:
                rendered = vision.expand(*rendered, image_refs, job.uid)
            except DataError as error:
                return str(error)
        cap = self.engine.source.layout.max_tokens_per_micro_batch
        cap = cap if self._context_tokens is None else min(cap, self._context_tokens)
        if len(rendered[0]) > cap:
            limits = "engine.max_tokens_per_micro_batch and the reward model's context"
            return f"{len(rendered[0])} tokens, more than the {cap} of {limits}"
        return make_sample(job.uid, *rendered, image_refs=image_refs, vision=vision)

    def _shown(self, job: RewardJob) -> tuple[list[dict[str, Any]] | None, list[ImageRef]]:
        """Returns the messages as the model reads them, and their images as it sees them."""
        if job.messages is None:
            return None, []
        if not job.images:
            return job.messages, []
        shown_by = self._shown_by if self._vision is None else self._vision
        assert shown_by is not None, "images that the policy was not shown"
        said, image_refs = shown_by.take(job.messages, Row({_COLUMN: list(job.images)}, job.uid, ""), _COLUMN)
        if self._vision is not None:
            return said, image_refs
        return [_in_words(message, shown_by.image_form.text) for message in said], []


def build_reward_engines(
    config: RewardConfig,
    group: WorkerGroup,
    shown_by: Vision | None = None,
    examples: Sequence[Example] = (),
) -> dict[str, ModelScorer]:
    """Builds the reward models of a run. Returns entry name -> scorer.

    Args:
        shown_by: how the policy is shown images.
        examples: what is answered.
    Raises:
        ModelError: a model cannot be used, or places no image, and an example has one.
    """
    scorers = {}
    have_images = any(example.image_refs for example in examples)
    for entry in config.functions:
        if isinstance(entry, ModelReward):
            model = open_model(entry.classifier)
            if have_images and model.vision is not None:
                _require_places(model.vision, entry.name)
            source = EngineSource(
                model=model.config,
                layout=entry.engine,
                head="sequence_scores",
                pad_token_id=model.tokenizer.pad_token_id,
            )
            scorers[entry.name] = ModelScorer(
                build_engine(group, f"reward {entry.name}", source),
                model.tokenizer,
                model.context.num_tokens,
                model.media_token_ids,
                vision=model.vision,
                shown_by=shown_by,
            )
    return scorers


def _require_places(vision: Vision, name: str) -> None:
    try:
        vision.require_places()
    except ModelError as error:
        raise ModelError(f"reward.functions ({name}): there are images, of which it places none: {error}") from None


def _in_words(message: dict[str, Any], image_text: str) -> dict[str, Any]:
    """Returns a message whose content is a string, with `image_text` in the place of each image."""
    content = message["content"]
    return {**message, "content": content if isinstance(content, str) else joined(content, image_text)}
