"""What a model says about its tokens: logprobs from the output projection, or values from a projection to one number.

Shapes: t tokens of this rank, n of them scored, D hidden size, V vocabulary.
"""

from typing import Literal

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from shardwise.engine.logprobs import selected_logprobs
from shardwise.engine.token_slice import ScoredTokens
from shardwise.ops import LogitTransform
from shardwise.types import TokenOutputs

HeadName = Literal["logprobs", "token_values", "sequence_scores"]
"""logprobs: a causal language model. token_values: a critic, one value for each trained token, from the state before
it. sequence_scores: a reward model, one score for each sequence, from the state at its end (see ScoredTokens.LAST)."""


LANGUAGE_MODEL_PROJECTIONS = frozenset({"lm_head", "embed_out"})
"""What transformers' models call the layer that maps the last hidden state to logits."""

OUTPUT_PROJECTIONS = LANGUAGE_MODEL_PROJECTIONS | {"score"}
"""Those, and what it calls the layer that maps it to scores."""


class LogprobHead(nn.Module):
    """The output projection of a causal language model, applied in chunks to the states that are scored."""

    scored = ScoredTokens.TRAINED
    pad_token_id = None

    def __init__(self, causal_lm: PreTrainedModel) -> None:
        super().__init__()
        self.projection: nn.Linear = causal_lm.get_output_embeddings()
        self._transform = LogitTransform.from_config(causal_lm.config.get_text_config())

    def forward(
        self, hidden: Tensor, states: Tensor, targets: Tensor, *, temperature: float, with_entropy: bool
    ) -> tuple[Tensor, ...]:
        """hidden [t, D], states and targets [n] -> logprobs [n] and, if asked for, entropy [n], float32."""
        logprobs, entropy = selected_logprobs(
            hidden.index_select(0, states),
            self.projection.weight,
            targets,
            temperature=temperature,
            transform=self._transform,
            with_entropy=with_entropy,
        )
        return (logprobs, entropy) if with_entropy else (logprobs,)

    def outputs(self, logprobs: Tensor, entropy: Tensor | None = None) -> TokenOutputs:
        return TokenOutputs(logprobs=logprobs, entropy=entropy)


class ValueHead(nn.Module):
    """A projection to one number (transformers' `score`)."""

    def __init__(self, projection: nn.Linear, scored: ScoredTokens, pad_token_id: int | None = None) -> None:
        super().__init__()
        self.projection = projection
        self.scored = scored
        self.pad_token_id = pad_token_id

    def forward(
        self, hidden: Tensor, states: Tensor, targets: Tensor, *, temperature: float, with_entropy: bool
    ) -> tuple[Tensor]:
        """hidden [t, D], states [n] -> values [n] float32; the other arguments are those of a LogprobHead, unused."""
        values = hidden.index_select(0, states).float() @ self.projection.weight.float()[0]
        return (values if self.projection.bias is None else values + self.projection.bias.float(),)

    def outputs(self, values: Tensor) -> TokenOutputs:
        return TokenOutputs(values=values)


def make_head(model: PreTrainedModel, name: HeadName) -> LogprobHead | ValueHead:
    """The head of a transformers model of the class that goes with `name`."""
    match name:
        case "logprobs":
            return LogprobHead(model)
        case "token_values":
            return ValueHead(model.score, ScoredTokens.TRAINED)
        case "sequence_scores":
            return ValueHead(model.score, ScoredTokens.LAST, model.config.get_text_config().pad_token_id)


def fresh_head(model: PreTrainedModel, name: HeadName) -> dict[str, Tensor] | None:
    """What a value head starts from where the model folder has none: whole tensors on the host by name, the same on
    every layout. None for a language model, whose head is part of it."""
    if name == "logprobs":
        return None
    std = getattr(model.config.get_text_config(), "initializer_range", 0.02)  # as transformers draws it: OPT has none
    weight = torch.empty(model.score.weight.shape, device="cpu")
    fresh = {"score.weight": weight.normal_(0.0, std, generator=torch.Generator().manual_seed(0))}
    if model.score.bias is not None:
        fresh["score.bias"] = torch.zeros(model.score.bias.shape, device="cpu")
    return fresh
