"""Sparse attention with an indexer (DeepSeek-V3.2, GLM-5): a small network that chooses, for every query, the keys
that the attention sees. transformers' own code makes the choice here, one sequence at a time.

An indexer is not told where sequences begin; the attention is, and gets what the indexer returned as `indices`. So the
choice is deferred until the attention runs, and skipped altogether when every key would be chosen.

Shapes: n sequences of L tokens, Q queries of each, D hidden size, d head dim of the indexer.
"""

import inspect
from collections.abc import Callable
from itertools import pairwise
from operator import itemgetter
from typing import Any, Protocol, TypeVar

import torch
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import ActivationWrapper

from shardwise.families.support import INDEXED, decoder_layers, indexers

_QUERIES_AT_ONCE = 512
"""Queries per call of an indexer, which scores every key for every query and head in float32."""

HIDES_CHOICE = "does not tell its attention which keys its indexer has chosen"

T = TypeVar("T")


class IndexerKeys(Protocol):
    """The part of transformers' cache that an indexer uses."""

    def update_indexer(self, keys: Tensor, layer_idx: int) -> Tensor:
        """Stores the queries' keys [n, Q, d]; returns those of all tokens up to the last query, [n, L, d]."""
        ...


class KeysSoFar:
    """The indexer's keys of sequences that are read from their beginning, block after block."""

    def __init__(self) -> None:
        self._blocks: list[Tensor] = []

    def update_indexer(self, keys: Tensor, layer_idx: int) -> Tensor:
        """See IndexerKeys."""
        self._blocks.append(keys)
        return self.all()

    def all(self) -> Tensor:
        """Returns all keys so far, [n, L, d]."""
        return torch.cat(self._blocks, dim=1)


class KeyChoice:
    """A deferred choice of keys. The attention of the indexer's layer, and of layers that share it, asks for it."""

    def __init__(self, indexer: nn.Module, arguments: dict[str, Any]) -> None:
        """`arguments`: what the indexer's forward was called with, tensors [B, t, ...] and tuples of them."""
        self._indexer = indexer
        self._arguments = arguments
        self._answer: Any = None

    @property
    def layer(self) -> int:
        """The indexer's layer number."""
        layer: int = self._indexer.layer_idx  # type: ignore[assignment]
        return layer

    @property
    def num_keys(self) -> int:
        """How many keys are chosen for every query; a query that sees no more than that gets all of them."""
        count: int = self._indexer.index_topk  # type: ignore[assignment]
        return count

    @property
    def key_bytes(self) -> int:
        """Bytes that the indexer's key of one token takes."""
        width: int = self._indexer.head_dim  # type: ignore[assignment]
        hidden: Tensor = self._arguments["hidden_states"]
        return width * hidden.element_size()

    def once(self, ask: Callable[["KeyChoice"], T]) -> T:
        """Returns what `ask` finds on the first call, and the same again for layers that share the choice."""
        if self._answer is None:
            self._answer, self._arguments = (ask(self),), {}
        (answer,) = self._answer
        return answer

    def among(self, seen: Tensor, keys: IndexerKeys) -> Tensor:
        """Has the indexer choose among the keys that queries may see.

        Args:
            seen: bool [B or 1, t, L], keys that a query may see at all.
        Returns:
            bool [B, t, L], True for the keys that are chosen.
        """
        return self._ask(self._arguments, seen, keys)

    def of_whole(self, length: int, pick: Callable[[Tensor], Tensor]) -> tuple[Tensor, Tensor]:
        """Chooses keys for whole sequences, a block of queries of one sequence at a time.

        Args:
            length: L, the tokens of each sequence.
            pick: takes a tensor [B, t, ...], as the layer got it, and returns the sequences' part of it, [n, L, ...].
        Returns:
            bool [n, L, L], True for the keys that a query sees; and the indexer's keys of all tokens, [n, L, d].
        """
        sequences = _picked(self._arguments, pick)
        count, device = len(sequences["hidden_states"]), sequences["hidden_states"].device
        chosen = torch.zeros(count, length, length, dtype=torch.bool, device=device)
        keys = [KeysSoFar() for _ in range(count)]
        for number, read in enumerate(keys):
            for start in range(0, length, _QUERIES_AT_ONCE):
                stop = min(start + _QUERIES_AT_ONCE, length)
                place = (slice(number, number + 1), slice(start, stop))
                seen = torch.ones(1, stop - start, stop, dtype=torch.bool, device=device).tril_(start)
                block = _picked(sequences, itemgetter(place))
                chosen[place][..., :stop] = self._ask(block, seen, read)
        return chosen, torch.cat([read.all() for read in keys])

    @torch.no_grad()
    def _ask(self, arguments: dict[str, Any], seen: Tensor, keys: IndexerKeys) -> Tensor:
        places: Tensor = self._indexer(**arguments | {"attention_mask": seen, "cache": keys})
        chosen = torch.zeros(*places.shape[:2], seen.shape[-1], dtype=torch.bool, device=seen.device)
        return chosen.scatter_(-1, places.long(), True).logical_and_(seen)


def _picked(value: Any, pick: Callable[[Tensor], Tensor]) -> Any:
    if isinstance(value, dict):
        return {name: _picked(part, pick) for name, part in value.items()}
    if isinstance(value, tuple):
        return tuple(_picked(part, pick) for part in value)
    return pick(value) if isinstance(value, Tensor) else value


class DeferredIndexer(ActivationWrapper):
    """An indexer that returns a KeyChoice, which the attention asks later, instead of the positions of keys."""

    @torch.compiler.disable
    def forward(self, *args: Any, **kwargs: Any) -> KeyChoice:
        """Keeps the arguments, which are the indexer's, for the choice."""
        indexer = self._checkpoint_wrapped_module
        bound = inspect.signature(indexer.forward).bind(*args, **kwargs)
        return KeyChoice(indexer, dict(bound.arguments))


def defer_choices(model: Any) -> None:
    """Wraps the indexers of a model in DeferredIndexer, in place. A layer gives its choice only to one that shares it:
    checkpointing would keep what a layer is given, and with it the mask of every layer."""
    for path, indexer in indexers(model).items():
        model.set_submodule(path, DeferredIndexer(indexer))
    for layer, following in pairwise(decoder_layers(model)):
        if any(isinstance(part, DeferredIndexer) for part in following.modules()):
            layer.register_forward_hook(_keep_choice_back)


def _keep_choice_back(_layer: nn.Module, _args: Any, output: Any) -> Any:
    if not isinstance(output, tuple):
        return output
    return tuple(None if isinstance(part, KeyChoice) else part for part in output)


def lacks_choice(attention: nn.Module, indices: Any) -> bool:
    """Whether a layer has an indexer but does not pass its choice on to the attention."""
    layer_types = getattr(getattr(attention, "config", None), "layer_types", None) or ()
    is_indexed = INDEXED in layer_types and layer_types[int(attention.layer_idx)] == INDEXED  # type: ignore[arg-type]
    return is_indexed and not isinstance(indices, KeyChoice)
