"""Brings the policy's weights to the rollout engines, and probes whether both sides compute the same with them."""

import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import islice
from typing import Any

import torch
from torch import Tensor

from shardwise.recipes.engines import RemoteEngine
from shardwise.recipes.placement import Ranks
from shardwise.transfer import WeightSyncError
from shardwise.types import Example, ImageRef, Metrics, MetricValue, Sample

PROBE_SEQUENCES = 2
PROBE_TOKENS = 13
"""Longest probed sequence; all its tokens but the first are compared."""
LONGEST_SEEN = 4096
"""Longest prompt with images that is probed, which takes a forward pass over all its tokens on each side."""

MEAN_DIFFERENCE_BOUNDS = {"float32": 1e-3, "float16": 1e-2, "bfloat16": 5e-2}
"""Compute dtype -> bound of the mean difference, in nats: several times what rounding causes, since the two sides add
up in different orders. The bound is on the mean and not on the largest difference, because in a mixture of experts
rounding may send a token to another expert."""


class WeightSync:
    """Syncs weights after a step, and compares logprobs of known tokens after the first sync and every n-th."""

    def __init__(
        self,
        policy: RemoteEngine,
        ranks: Ranks,
        examples: Sequence[Example],
        *,
        probe_every_syncs: int,
        image_token_id: int | None = None,
    ) -> None:
        """
        Args:
            examples: the prompts that the known tokens are taken from.
            probe_every_syncs: 0 never probes.
            image_token_id: the token that stands for images, if the model sees any; never compared.
        """
        self._policy, self._ranks, self._every = policy, ranks, probe_every_syncs
        self._known = known_prompts(examples, image_token_id) if probe_every_syncs else []
        self._last_probed: int | None = None
        self._seconds_per_byte: float | None = None
        self.shares: dict[str, float] = {}
        """Shares of the last sync's seconds: sync/share_of_limit is what moving its bytes would take with nothing else
        to do, sync/share_of_proof what verification alone took on the rank where it took longest. sync/share_read_back:
        of its tensors, those whose served values were compared, at the engine that can read back fewest."""

    def sync(self, version: int) -> Metrics:
        """Syncs the weights. Returns only once every rollout engine verifiably serves this version.

        Raises:
            WeightSyncError: an engine serves other weights than were sent, or than another engine serves.
        """
        if self._seconds_per_byte is None:
            self._seconds_per_byte = self._ranks.seconds_per_byte()
        start = time.perf_counter()
        receipts = self._ranks.sync_weights(version)
        seconds = time.perf_counter() - start
        self.shares = {
            "sync/share_of_limit": receipts[0]["num_bytes_moved"] * self._seconds_per_byte / seconds,
            "sync/share_of_proof": max(receipt["seconds_of_proof"] for receipt in receipts) / seconds,
            "sync/share_read_back": min(receipt["num_proven"] / receipt["num_tensors"] for receipt in receipts),
        }
        by_rank = dict(zip(self._ranks.rollouts.ranks, receipts, strict=True))
        require_same_receipts(version, by_rank, num_parts=self._ranks.num_weight_parts)
        return {"sync/bytes": MetricValue.sum(receipts[0]["num_bytes_moved"])}

    def probe(self, version: int) -> Metrics:
        """Compares logprobs if a probe is due; nothing may be sampled meanwhile. The first probe reports nothing, so
        that a run that resumes from a checkpoint writes the same metrics as one that was never interrupted.

        Raises:
            WeightSyncError: they differ by more than rounding.
        """
        last = self._last_probed
        if not self._known or (last is not None and version // self._every == last // self._every):
            return {}
        self._last_probed = version
        differences = self._differences(version)
        if last is None:
            return {}
        return {
            "sync/probe_max_difference": MetricValue.max(float(differences.max())),
            "sync/probe_mean_difference": MetricValue.mean(float(differences.sum()), len(differences)),
        }

    def _differences(self, version: int) -> Tensor:
        """[N] differences in nats, over all known tokens and all ranks with a rollout engine."""
        scored = self._policy.score([prompt.sample for prompt in self._known], temperature=1.0)
        expected = [values[1:].tolist() for values in scored]
        compare = partial(
            compare_logprobs, version, self._known, expected, dtype=self._policy.source.layout.param_dtype
        )
        sequences, image_refs = zip(*((prompt.token_ids, prompt.image_refs) for prompt in self._known), strict=True)
        found = self._ranks.rollouts.call("rollout_logprobs", list(sequences), list(image_refs))
        ranks = self._ranks.rollouts.ranks
        return torch.cat([compare(logprobs, rank=rank) for rank, logprobs in zip(ranks, found, strict=True)])


@dataclass(frozen=True, slots=True)
class KnownPrompt:
    """Tokens for which trainer and rollout engine have to compute the same logprobs."""

    uid: str
    token_ids: list[int]
    places: list[int]
    """Positions of the tokens that are compared, from 1 on."""
    position_ids: Tensor | None = None
    """[3, L] int64, as in Example."""
    image_refs: list[ImageRef] = field(default_factory=list)

    @property
    def sample(self) -> Sample:
        """The prompt as a Sample for the trainer."""
        return Sample(
            uid=self.uid,
            token_ids=torch.tensor(self.token_ids),
            loss_mask=torch.isin(torch.arange(len(self.token_ids)), torch.tensor(self.places)),
            position_ids=self.position_ids,
            image_refs=self.image_refs,
        )


def known_prompts(examples: Sequence[Example], image_token_id: int | None = None) -> list[KnownPrompt]:
    """Returns the beginnings of a few prompts, without their images; if none is longer than a token, tokens repeated,
    since a sequence's first token has no logprob. Also returns the shortest prompt with images, whole, of which the
    first tokens after the first image are compared."""
    scored = (tokens for tokens in _beginnings(examples, image_token_id) if len(tokens) > 1)
    sequences = list(islice(scored, PROBE_SEQUENCES))
    if not sequences:
        sequences = [tokens * 2 for tokens in islice(_beginnings(examples, image_token_id), PROBE_SEQUENCES)]
    known = [KnownPrompt(f"probe {n}", tokens, list(range(1, len(tokens)))) for n, tokens in enumerate(sequences)]
    seen = [example for example in examples if example.image_refs and len(example.prompt_ids) <= LONGEST_SEEN]
    if seen and image_token_id is not None:
        shortest = min(seen, key=lambda example: len(example.prompt_ids))
        tokens = shortest.prompt_ids
        behind = range(tokens.index(image_token_id) + 1, len(tokens))
        places = [place for place in behind if tokens[place] != image_token_id][:PROBE_TOKENS]
        if places:
            known.append(KnownPrompt("probe image", tokens, places, shortest.position_ids, shortest.image_refs))
    return known


def _beginnings(examples: Sequence[Example], image_token_id: int | None) -> Iterator[list[int]]:
    """The first tokens of every prompt that has some beside its images."""
    for example in examples:
        words = (token for token in example.prompt_ids if token != image_token_id)
        if tokens := list(islice(words, PROBE_TOKENS)):
            yield tokens


def require_same_receipts(version: int, receipts: Mapping[int, dict[str, Any]], *, num_parts: int = 1) -> None:
    """Raises WeightSyncError unless all ranks that hold the same part of the weights hold the same.

    Args:
        receipts: by rank.
        num_parts: neighboring ranks that hold parts of the weights.
    """
    firsts: dict[int, tuple[int, dict[str, Any]]] = {}
    for rank, receipt in receipts.items():
        first, expected = firsts.setdefault(rank % num_parts, (rank, receipt))
        for key in ("version", "num_tensors", "num_bytes", "digest"):
            if receipt[key] != expected[key]:
                raise WeightSyncError(
                    f"weight sync {version}: rank {rank} has {key}={receipt[key]}, rank {first} has {expected[key]}; "
                    "both should hold the same weights"
                )


def compare_logprobs(
    version: int,
    known: Sequence[KnownPrompt],
    expected: Sequence[Sequence[float]],
    found: Sequence[Sequence[float]],
    *,
    dtype: str,
    rank: int,
) -> Tensor:
    """[N] differences in nats over all places that are compared.

    Args:
        expected, found: logprobs of every token after the first, by the trainer and by the rollout engine of `rank`.
        dtype: the compute dtype of both.
    Raises:
        WeightSyncError: their mean is above the dtype's bound; names the token with the largest difference.
    """
    tokens = [(number, place) for number, prompt in enumerate(known) for place in prompt.places]
    trainer, rollout = (
        torch.tensor([rows[number][place - 1] for number, place in tokens]) for rows in (expected, found)
    )
    differences = (trainer - rollout).abs().nan_to_num(nan=torch.inf)
    mean, bound = float(differences.mean()), MEAN_DIFFERENCE_BOUNDS[dtype]
    if mean > bound:
        worst = int(differences.argmax())
        number, place = tokens[worst]
        seen = ", which has images" if known[number].image_refs else ""
        raise WeightSyncError(
            f"weight sync {version}: the rollout engine of rank {rank} gives token {known[number].token_ids[place]} "
            f"(place {place} of known prompt {number}{seen}) a logprob of {rollout[worst]:.4f}, the trainer "
            f"{trainer[worst]:.4f}; over {len(tokens)} known tokens they differ by {mean:.4f} on average, more than "
            f"the {bound} of {dtype}. Every weight has arrived, so the two compute different things with them: a "
            "tensor taken for another or transposed, another attention, rope scaling, logit transform or dtype"
        )
    return differences
