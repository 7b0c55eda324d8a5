"""Distillation: a teacher's hidden states and output projection, and the student's divergence from them.

Shapes: n scored tokens of one rank, D hidden size of the student, E of the teacher, V vocabulary.
"""

from dataclasses import dataclass

from torch import Tensor

from shardwise.engine.divergence import DivergenceKind, VocabularyTerms, vocabulary_divergence
from shardwise.ops import LogitTransform
from shardwise.uploads import to_device


@dataclass(frozen=True, slots=True, kw_only=True)
class Divergence:
    """A divergence of the student's distributions from the teacher's; see `vocabulary_divergence`.

    Example: `Divergence(kind="jensen_shannon", beta=0.1, temperature=2.0)`
    """

    kind: DivergenceKind | VocabularyTerms = "forward_kl"
    """The name of the divergence, or the terms that are summed over the vocabulary."""
    beta: float = 0.5
    """In (0, 1); only jensen_shannon reads it."""
    temperature: float = 1.0
    """The logits of both models are divided by it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TeacherOutputs:
    """A teacher's distributions for the scored tokens of one micro-batch, as what they are computed from: n x E numbers
    and a projection that all micro-batches of a step share, instead of n x V logits."""

    states: Tensor
    """[n, E] in the teacher's compute dtype, on the host: of the tokens that this rank scores, in their order."""
    projection: Tensor
    """[V, E], whole, on the device."""
    transform: LogitTransform
    """What the teacher's family does to its logits."""
    divergence: Divergence

    def divergence_of(self, states: Tensor, projection: Tensor, transform: LogitTransform) -> Tensor:
        """Returns the divergence [n] float32, nats, of a student with these states [n, D], output projection [V, D] and
        transform."""
        assert len(states) == len(self.states), f"{len(states)} scored tokens, teacher outputs of {len(self.states)}"
        return vocabulary_divergence(
            states,
            projection,
            to_device(self.states, states.device),
            self.projection,
            kind=self.divergence.kind,
            beta=self.divergence.beta,
            temperature=self.divergence.temperature,
            transform=transform,
            teacher_transform=self.transform,
        )
