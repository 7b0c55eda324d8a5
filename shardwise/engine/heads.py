"""What a model says about its tokens: logprobs from the output projection, or values from a projection to one number.

Shapes: t tokens of this rank, n of them scored, D hidden size, V vocabulary.
"""

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from shardwise.config import ModelError
from shardwise.engine.logprobs import selected_logprobs
from shardwise.engine.teacher_outputs import TeacherOutputs
from shardwise.engine.token_slice import ScoredTokens
from shardwise.ops import LogitTransform

HeadName = Literal["logprobs", "token_values", "sequence_scores"]
"""logprobs: a causal language model. token_values: a critic, one value for each trained token, from the state before
it. sequence_scores: a reward model, one score for each sequence, from the state at its end (see ScoredTokens.LAST)."""


LANGUAGE_MODEL_PROJECTIONS = frozenset({"lm_head", "embed_out"})
"""What transformers' models call the layer that maps the last hidden state to logits."""

VALUE_PROJECTIONS = ("score", "classifier")
"""What they call the layer that maps the last hidden state to values; the second is that of GPT-2's and GPT-NeoX's
token classifiers."""

OUTPUT_PROJECTIONS = LANGUAGE_MODEL_PROJECTIONS | set(VALUE_PROJECTIONS)


@dataclass(frozen=True, slots=True, kw_only=True)
class Wanted:
    """What a language model is asked about its scored tokens. A value head has one answer and reads none of it."""

    temperature: float = 1.0
    """Temperature of logprobs and entropy; the divergence has one of its own."""
    logprobs: bool = True
    entropy: bool = False
    """Only together with the logprobs."""
    states: bool = False
    """The hidden states themselves: what a teacher gives."""
    teacher: TeacherOutputs | None = None
    """The teacher that a student's divergence is measured from. FSDP does not cast it to the student's dtype in
    here."""


class LogprobHead(nn.Module):
    """The output projection of a causal language model, applied in chunks to the states that are scored."""

    scored = ScoredTokens.TRAINED
    pad_token_id = None

    def __init__(self, causal_lm: PreTrainedModel) -> None:
        super().__init__()
        self.projection: nn.Linear = causal_lm.get_output_embeddings()
        self.transform = LogitTransform.from_config(causal_lm.config.get_text_config())

    def forward(self, hidden: Tensor, states: Tensor, targets: Tensor, wanted: Wanted) -> dict[str, Tensor]:
        """hidden [t, D], states and targets [n] -> what is wanted: logprobs, entropy and divergence, [n] float32 under
        the names of TokenOutputs, and states [n, D]."""
        scored, weight = hidden.index_select(0, states), self.projection.weight
        found: dict[str, Tensor] = {}
        if wanted.logprobs:
            found["logprobs"], entropy = selected_logprobs(
                scored,
                weight,
                targets,
                temperature=wanted.temperature,
                transform=self.transform,
                with_entropy=wanted.entropy,
            )
            if wanted.entropy:
                found["entropy"] = entropy
        if wanted.teacher is not None:
            found["divergence"] = wanted.teacher.divergence_of(scored, weight, self.transform)
        if wanted.states:
            found["states"] = scored
        return found


class ValueHead(nn.Module):
    """A projection to one number (see VALUE_PROJECTIONS)."""

    def __init__(self, projection: nn.Linear, scored: ScoredTokens, pad_token_id: int | None = None) -> None:
        super().__init__()
        self.projection = projection
        self.scored = scored
        self.pad_token_id = pad_token_id

    def forward(self, hidden: Tensor, states: Tensor, targets: Tensor, wanted: Wanted) -> dict[str, Tensor]:
        """hidden [t, D], states [n] -> values [n] float32; the other arguments are those of a LogprobHead, unused."""
        values = hidden.index_select(0, states).float() @ self.projection.weight.float()[0]
        return {"values": values if self.projection.bias is None else values + self.projection.bias.float()}


def value_projection_name(model: PreTrainedModel) -> str:
    """Which of VALUE_PROJECTIONS a model with a value head has. Raises ModelError: none, or it is not one layer."""
    for name in VALUE_PROJECTIONS:
        if hasattr(getattr(model, name, None), "weight"):
            return name
    raise ModelError(
        f"{type(model).__name__} is not supported: it has no layer called {' or '.join(VALUE_PROJECTIONS)} as its head"
    )


def make_head(model: PreTrainedModel, name: HeadName) -> LogprobHead | ValueHead:
    """The head of a transformers model of the class that goes with `name`."""
    if name == "logprobs":
        return LogprobHead(model)
    projection = getattr(model, value_projection_name(model))
    if name == "token_values":
        return ValueHead(projection, ScoredTokens.TRAINED)
    return ValueHead(projection, ScoredTokens.LAST, model.config.get_text_config().pad_token_id)


def fresh_head(model: PreTrainedModel, name: HeadName) -> dict[str, Tensor] | None:
    """Initial weights of a value head, for a model folder that has none: whole tensors on the host by name, the same on
    every layout. None for a language model, whose head is part of it."""
    if name == "logprobs":
        return None
    path = value_projection_name(model)
    projection = getattr(model, path)
    std = getattr(model.config.get_text_config(), "initializer_range", 0.02)  # as in transformers; OPT lacks this key
    weight = torch.empty(projection.weight.shape, device="cpu")
    fresh = {f"{path}.weight": weight.normal_(0.0, std, generator=torch.Generator().manual_seed(0))}
    if projection.bias is not None:
        fresh[f"{path}.bias"] = torch.zeros(projection.bias.shape, device="cpu")
    return fresh
