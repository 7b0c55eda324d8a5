"""Sparse attention with an indexer (DeepSeek-V3.2, GLM-5): a small network that chooses for every query the keys which
the attention sees. transformers' own code chooses here, one sequence at a time.

An indexer is not told where sequences begin; the attention is, and gets what the indexer returned as `indices`. So the
choice is put off until the attention runs, and not made at all where every key would be chosen.

Shapes: n sequences of L tokens, Q queries of each, D hidden size, d head dim of the indexer.
"""

import inspect
from collections.abc import Callable
from typing import Any, Protocol, TypeVar

import torch
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import ActivationWrapper

from shardwise.families.support import INDEXED, indexers

_QUERIES_AT_ONCE = 512
"""transformers scores every key for every query and head of an indexer in float32: these at a time."""

HIDES_CHOICE = "does not tell its attention which keys its indexer has chosen"

T = TypeVar("T")


class IndexerKeys(Protocol):
    """What an indexer asks transformers' cache for."""

    def update_indexer(self, keys: Tensor, layer_idx: int) -> Tensor:
        """keys [n, Q, d] of the queries -> [n, L, d], of all tokens up to the last of them."""
        ...


class KeysSoFar:
    """Those of sequences that are read from their beginning, block after block."""

    def __init__(self) -> None:
        self._blocks: list[Tensor] = []

    def update_indexer(self, keys: Tensor, layer_idx: int) -> Tensor:
        """See IndexerKeys."""
        self._blocks.append(keys)
        return self.all()

    def all(self) -> Tensor:
        """[n, L, d]."""
        return torch.cat(self._blocks, dim=1)


class KeyChoice:
    """A choice that an indexer will be asked for, by the attention of its layer and of those that share it."""

    def __init__(self, indexer: nn.Module, arguments: dict[str, Any]) -> None:
        """`arguments`: those of the indexer's forward, tensors of [B, t, ...] and tuples of them."""
        self._indexer = indexer
        self._arguments = arguments
        self._answer: Any = None

    @property
    def layer(self) -> int:
        """That of the indexer."""
        layer: int = self._indexer.layer_idx  # type: ignore[assignment]
        return layer

    @property
    def num_keys(self) -> int:
        """Chosen for every query; all that it sees where there are no more."""
        count: int = self._indexer.index_topk  # type: ignore[assignment]
        return count

    @property
    def key_bytes(self) -> int:
        """Of one token."""
        width: int = self._indexer.head_dim  # type: ignore[assignment]
        hidden: Tensor = self._arguments["hidden_states"]
        return width * hidden.element_size()

    def once(self, ask: Callable[["KeyChoice"], T]) -> T:
        """What `ask` finds, the first time; the same again where another layer shares the choice."""
        if self._answer is None:
            self._answer, self._arguments = (ask(self),), {}
        (answer,) = self._answer
        return answer

    @torch.no_grad()
    def among(self, seen: Tensor, keys: IndexerKeys, pick: Callable[[Tensor], Tensor]) -> Tensor:
        """
        Args:
            seen: bool [n or 1, Q, L], keys that a query may see at all.
            pick: of a tensor [B, t, ...], as the layer got it, that of the queries [n, Q, ...].
        Returns:
            bool [n, Q, L], those of them that are chosen.
        """
        picked = {name: _picked(value, pick) for name, value in self._arguments.items()}
        places: Tensor = self._indexer(**picked | {"attention_mask": seen, "cache": keys})
        chosen = torch.zeros(*places.shape[:2], seen.shape[-1], dtype=torch.bool, device=seen.device)
        return chosen.scatter_(-1, places.long(), True).logical_and_(seen)

    def of_whole(self, length: int, keys: KeysSoFar, pick: Callable[[Tensor], Tensor]) -> Tensor:
        """Bool [n, L, L], True = seen, of sequences of L = `length` tokens that `pick` takes from a tensor [B, t, ...]
        as [n, L, ...]. `keys` has them all afterwards."""
        rows = []
        for start in range(0, length, _QUERIES_AT_ONCE):
            stop = min(start + _QUERIES_AT_ONCE, length)
            seen = torch.ones(stop - start, stop, dtype=torch.bool, device=self._device).tril_(start)[None]
            chosen = self.among(seen, keys, lambda tensor, block=slice(start, stop): pick(tensor)[:, block])  # type: ignore[misc]
            rows.append(nn.functional.pad(chosen, (0, length - stop)))
        return torch.cat(rows, dim=1)

    @property
    def _device(self) -> torch.device:
        hidden: Tensor = self._arguments["hidden_states"]
        return hidden.device


def _picked(value: Any, pick: Callable[[Tensor], Tensor]) -> Any:
    if isinstance(value, tuple):
        return tuple(_picked(part, pick) for part in value)
    return pick(value) if isinstance(value, Tensor) else value


class DeferredIndexer(ActivationWrapper):
    """Returns what its attention will ask, instead of places of keys."""

    @torch.compiler.disable
    def forward(self, *args: Any, **kwargs: Any) -> KeyChoice:
        """Arguments of the indexer."""
        indexer = self._checkpoint_wrapped_module
        bound = inspect.signature(indexer.forward).bind(*args, **kwargs)
        return KeyChoice(indexer, dict(bound.arguments))


def defer_choices(model: Any) -> None:
    """Puts the indexers of a model into DeferredIndexer, in place."""
    for path, indexer in indexers(model).items():
        model.set_submodule(path, DeferredIndexer(indexer))


def lacks_choice(attention: nn.Module, indices: Any) -> bool:
    """Whether a layer has an indexer and does not call its attention with what that has chosen."""
    layer_types = getattr(getattr(attention, "config", None), "layer_types", None) or ()
    is_indexed = INDEXED in layer_types and layer_types[int(attention.layer_idx)] == INDEXED  # type: ignore[arg-type]
    return is_indexed and not isinstance(indices, KeyChoice)
