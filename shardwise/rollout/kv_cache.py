"""The key/value cache of the embedded engine, and the attention and sequence mixers that read and write it.

Shapes: B active rows, P prompts, H query heads, K key/value heads, L tokens, d head dim.
"""

import inspect
import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import ActivationWrapper
from transformers import AttentionInterface, AttentionMaskInterface, Cache, PreTrainedModel

from shardwise.config import ModelError
from shardwise.families import (
    DROPS_KEYWORDS,
    HAS_OWN_MASK,
    HIDES_CHOICE,
    KeyChoice,
    Mask,
    attention_span,
    is_own_mask,
    lacks_choice,
    mask_as_span,
    sequence_mixers,
    shows_blocks,
    with_release,
)
from shardwise.ops import (
    VARLEN_READS_CACHES,
    PackedLayout,
    attend,
    seen_among_blocks,
    seen_keys,
    varlen_attention,
    varlen_decode_attention,
    varlen_problem,
)
from shardwise.rollout.decode_kernels import DecodeKernels
from shardwise.rollout.mixer_states import MixerStates, places_by_length

CACHED_ATTENTION = "shardwise_cached"
_UNBOUNDED = (0.0, math.inf)
_SPAN_STEP = 64
"""On a GPU, decode steps read a multiple of this many cache positions."""
_CACHE_PARAMETERS = ("cache", "cache_params", "past_key_values")
"""The names that families give the cache parameter of a sequence mixer."""

_cache_in_use: ContextVar["KVCache"] = ContextVar("_cache_in_use")


def register_cached_attention() -> None:
    """Makes `attn_implementation=CACHED_ATTENTION` known; models then take `kv_cache=KVCache(...)` in forward."""
    AttentionInterface.register(CACHED_ATTENTION, _cached_attention)
    AttentionMaskInterface.register(CACHED_ATTENTION, mask_as_span)


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheSize:
    """Memory that a cache takes, over all layers."""

    token_bytes: int
    """Bytes of the keys and values of one token in one row."""
    carried_bytes: int
    """Bytes of the states that mixers carry on in one row, whatever its length."""

    def row_bytes(self, num_tokens: int) -> int:
        """Returns the bytes of a row with room for `num_tokens`."""
        return num_tokens * self.token_bytes + self.carried_bytes


class KVCache:
    """One row of keys and values, and of the states of mixers, for each sequence that is being decoded. Active rows are
    0 .. B - 1, without gaps; the rows after the room for them hold prompts whose completions have not all begun.

    A forward pass is either a prefill (set by `begin_prefill`) or a decode step (`begin_decode`).
    """

    def __init__(
        self, *, num_rows: int, capacity_tokens: int, device: torch.device, kernels: DecodeKernels | None = None
    ) -> None:
        """
        Args:
            kernels: attention kernels for decode steps; None: torch's.
        """
        self._kernels = kernels
        self._num_rows = num_rows
        self._capacity_tokens = capacity_tokens
        self._device = device
        self._layers: dict[int, tuple[Tensor, Tensor]] = {}
        self._index_keys: dict[int, Tensor] = {}
        """Indexer keys [rows, capacity, d], by the layer of the indexer."""
        self._index_bytes: dict[int, int] = {}
        """Bytes of one token's indexer key, by layer, also for indexers that need not be asked."""
        self._mixers: dict[int, MixerStates] = {}
        self._prefill: Tensor | None = None
        self._prompts_by_length: dict[int, list[int]] = {}
        self._blocks: Tensor | None = None
        self._positions = torch.zeros(0, dtype=torch.int64, device=device)
        self._rows = torch.zeros_like(self._positions)
        self._lengths = self._positions.int()
        self._span = 0
        self._masks: dict[tuple[int | None, int | None], Tensor] = {}
        self._layers_seen: list[int] = []
        self._mixers_seen: list[int] = []

    def begin_prefill(self, rows: Tensor, lengths: Sequence[int], blocks: Tensor | None = None) -> None:
        """Makes the next forward pass read right-padded prompts of `lengths`; row rows[i] gets the keys of prompt i.

        Args:
            blocks: [P, L], the block of every token, -1 for none; tokens of one block see each other both ways.
        """
        self._prefill = rows
        self._blocks = blocks
        self._prompts_by_length = places_by_length(lengths)
        self._layers_seen, self._mixers_seen = [], []

    def begin_decode(self, positions: Tensor, *, span: int) -> None:
        """Makes the next forward pass append one token to rows 0 .. B - 1, at `positions` [B], all below `span`."""
        self._prefill = None
        # On a CPU every key costs time; on a GPU every new shape does, for which a compiled step is made anew.
        step = 1 if self._device.type == "cpu" else _SPAN_STEP
        self._span = min(-(-span // step) * step, self._capacity_tokens)
        self._positions, self._masks = positions, {}
        self._lengths = positions.int() + 1
        self._rows = torch.arange(len(positions), device=self._device)
        self._layers_seen, self._mixers_seen = [], []

    def copy_prompt(self, source: int, targets: slice, num_tokens: int) -> None:
        """Copies the first tokens of a row to other rows, to which nothing has been appended yet."""
        for stored in (tensor for pair in self._layers.values() for tensor in pair):
            stored[targets, :, :num_tokens] = stored[source, :, :num_tokens]
        for stored in self._index_keys.values():
            stored[targets, :num_tokens] = stored[source, :num_tokens]
        for stored in self._carried():
            stored[targets] = stored[source]

    def move_rows(self, source: Tensor, target: Tensor) -> None:
        """Copies whole rows, to close the gaps that finished rows leave."""
        for keys, values in self._layers.values():
            keys[target], values[target] = keys[source], values[source]
        for stored in (*self._index_keys.values(), *self._carried()):
            stored[target] = stored[source]

    @contextmanager
    def in_use(self) -> Iterator[None]:
        """Makes compiled forward passes inside the context use this cache."""
        token = _cache_in_use.set(self)
        try:
            yield
        finally:
            _cache_in_use.reset(token)

    @property
    def layers_seen(self) -> list[int]:
        """The layers whose attention has run in this forward pass, in the order in which they ran."""
        return self._layers_seen

    @property
    def mixers_seen(self) -> list[int]:
        """The layers whose sequence mixer has run in this forward pass, in the order in which they ran."""
        return self._mixers_seen

    @property
    def size(self) -> "CacheSize":
        """Memory per token and per row, of the layers that have stored something so far."""
        rows = [tensor[0] for tensor in self._carried()]
        tokens = [tensor[0, :, 0] for pair in self._layers.values() for tensor in pair]
        return CacheSize(
            token_bytes=sum(tensor.nbytes for tensor in tokens) + sum(self._index_bytes.values()),
            carried_bytes=sum(tensor.nbytes for tensor in rows),
        )

    def mix(self, mixer: "CachedMixer", hidden_states: Tensor, **kwargs: Any) -> Tensor:
        """Runs a mixer on hidden_states [B or P, L, D] and keeps the state after each sequence's last token."""
        self._mixers_seen.append(mixer.layer)
        states = self._mixers.setdefault(mixer.layer, MixerStates(self._num_rows))
        if self._prefill is None:
            states.go_on(len(hidden_states))
            return mixer.compute(hidden_states, states, **kwargs)
        out = torch.zeros_like(hidden_states)
        for length, places in self._prompts_by_length.items():
            states.begin(self._prefill[places])
            out[places, :length] = mixer.compute(hidden_states[places, :length], states, **kwargs)
        return out

    def attend(
        self,
        layer: int,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        *,
        scaling: float | None,
        window: int | None,
        chunk: int | None,
        softcap: float | None,
        sinks: Tensor | None = None,
        choice: KeyChoice | None = None,
        in_blocks: bool = True,
    ) -> Tensor:
        """Stores key and value, and attends: query [B or P, H, L, d] -> [B or P, H, L, dv]. Options as in `ops.attend`;
        `choice` is given in layers with an indexer, and `in_blocks` is False in those where no tokens of a prompt see
        each other both ways."""
        self._layers_seen.append(layer)
        chosen = None if choice is None else choice.once(self._chosen_keys)
        assert chosen is None or window is chunk is None, "no family has both"
        fits = chunk is None and softcap is None and choice is None
        is_varlen = fits and varlen_problem(query, value.shape[-1]) is None
        reads_varlen = is_varlen and VARLEN_READS_CACHES
        kernels = self._kernels if choice is None else None
        # Our kernels read only what was written. Others may read beyond it, and a mask does not keep that out: NaN
        # times a weight of 0 is NaN.
        keys, values = self._storage(layer, key, value, heads_inside=reads_varlen, is_zeroed=kernels is None)
        options: dict[str, Any] = {"scaling": scaling, "window": window, "chunk": chunk, "softcap": softcap}
        if self._prefill is not None:
            # Right padding lands beyond a prompt's end, where decode steps overwrite it before they read it.
            keys[self._prefill, :, : key.shape[2]] = key
            values[self._prefill, :, : value.shape[2]] = value
            if in_blocks and self._blocks is not None:
                assert chosen is chunk is None, "no family has both"
                return _attend_among_blocks(
                    query, key, value, self._blocks, scaling=scaling, window=window, softcap=softcap, sinks=sinks
                )
            if is_varlen and (sinks is not None or (window is not None and window < key.shape[2])):
                return _attend_as_pack(query, key, value, scaling=scaling, window=window, sinks=sinks)
            if chosen is not None:
                return attend(query, key, value, mask=chosen, scaling=scaling, softcap=softcap, sinks=sinks)
            return attend(query, key, value, causal=True, sinks=sinks, **options)
        if kernels is not None:
            return kernels.attend(query, key, value, keys, values, self._positions, sinks=sinks, **options)
        keys[self._rows, :, self._positions] = key[:, :, 0]
        values[self._rows, :, self._positions] = value[:, :, 0]
        keys, values = keys[: len(key)], values[: len(key)]
        if reads_varlen:
            return varlen_decode_attention(
                query,
                keys,
                values,
                self._lengths,
                longest=self._span,
                scaling=scaling,
                window=window,
                sinks=sinks,
            )
        num_rows, num_kv_heads, _, head_dim = key.shape
        out = attend(
            query.view(num_rows, num_kv_heads, -1, head_dim),  # heads that share keys become a query dim
            keys[:, :, : self._span],
            values[:, :, : self._span],
            scaling=scaling,
            softcap=softcap,
            sinks=None if sinks is None else sinks.view(num_kv_heads, -1),
            mask=self._mask(window, chunk) if chosen is None else chosen,
        )
        return out.reshape(num_rows, query.shape[1], 1, value.shape[-1])

    def _chosen_keys(self, choice: KeyChoice) -> Tensor | None:
        """Returns which keys the queries see, [P, 1, L, L] or [B, 1, 1, span]; None: all earlier ones, because no row
        can hold more keys than are chosen. Stores the keys that the indexer compares with."""
        layer = choice.layer
        self._index_bytes[layer] = choice.key_bytes
        if self._capacity_tokens <= choice.num_keys:
            return None
        if self._prefill is None:
            stored = _RowKeys(self._index_keys[layer], self._rows, self._positions, self._span)
            return choice.among(self._mask(None, None)[:, 0], stored)[:, None]
        longest, num_prompts = max(self._prompts_by_length), len(self._prefill)
        chosen = torch.ones(longest, longest, dtype=torch.bool, device=self._device).tril_().repeat(num_prompts, 1, 1)
        for length, places in self._prompts_by_length.items():
            of_prompts = partial(_first_tokens, places, length)
            chosen[places, :length, :length], keys = choice.of_whole(length, of_prompts)
            if layer not in self._index_keys:
                self._index_keys[layer] = keys.new_zeros(self._num_rows, self._capacity_tokens, keys.shape[-1])
            self._index_keys[layer][self._prefill[places], :length] = keys
        return chosen[:, None]

    def _storage(
        self, layer: int, key: Tensor, value: Tensor, *, heads_inside: bool, is_zeroed: bool
    ) -> tuple[Tensor, Tensor]:
        """Returns a layer's stored keys and values, [rows, K, capacity, d] each. In memory a row is laid out head by
        head, with `heads_inside` token by token."""
        if layer not in self._layers:
            self._layers[layer] = (
                self._room(key, heads_inside, is_zeroed),
                self._room(value, heads_inside, is_zeroed),
            )
        return self._layers[layer]

    def _room(self, like: Tensor, heads_inside: bool, is_zeroed: bool) -> Tensor:
        _, num_heads, _, dim = like.shape
        if heads_inside:
            return like.new_zeros(self._num_rows, self._capacity_tokens, num_heads, dim).transpose(1, 2)
        shape = (self._num_rows, num_heads, self._capacity_tokens, dim)
        return like.new_zeros(shape) if is_zeroed else like.new_empty(shape)

    def _carried(self) -> Iterator[Tensor]:
        """Yields the states that mixers carry on, [rows, ...] each."""
        for states in self._mixers.values():
            yield from states.tensors()

    def _mask(self, window: int | None, chunk: int | None) -> Tensor:
        """Returns the mask [B, 1, 1, span], shared by all layers with the same window and chunk size."""
        if (window, chunk) not in self._masks:
            keys = torch.arange(self._span, device=self._device)
            seen = seen_keys(self._positions[:, None], keys, window=window, chunk=chunk)
            self._masks[window, chunk] = seen[:, None, None]
        return self._masks[window, chunk]


class _RowKeys:
    """The stored keys that an indexer compares with in a decode step, with the interface of transformers' cache."""

    def __init__(self, stored: Tensor, rows: Tensor, positions: Tensor, span: int) -> None:
        self._stored, self._rows, self._positions, self._span = stored, rows, positions, span

    def update_indexer(self, keys: Tensor, layer_idx: int) -> Tensor:
        """See IndexerKeys."""
        self._stored[self._rows, self._positions] = keys[:, 0]
        return self._stored[: len(keys), : self._span]


class CachedMixer(ActivationWrapper):
    """A sequence mixer that keeps its states in the cache of the forward pass."""

    def __init__(self, mixer: nn.Module, cache_parameter: str) -> None:
        """`cache_parameter`: the name of the cache parameter of the mixer's forward."""
        super().__init__(mixer)
        self._cache_parameter = cache_parameter
        if tuple(getattr(mixer, "time_step_limit", None) or _UNBOUNDED) != _UNBOUNDED:
            in_proj: Any = mixer.in_proj
            in_proj.register_forward_hook(partial(_bound_time_steps, mixer))

    @property
    def layer(self) -> int:
        """The layer's number."""
        layer: int = self._checkpoint_wrapped_module.layer_idx
        return layer

    @torch.compiler.disable
    def forward(self, hidden_states: Tensor, *, kv_cache: KVCache | None = None, **kwargs: Any) -> Tensor:
        """Computes the mixer through `kv_cache`: [B or P, L, D] -> the same shape."""
        if kv_cache is None:
            kind = type(self._checkpoint_wrapped_module).__name__
            raise ModelError(f"The family of {kind} is not supported: it {DROPS_KEYWORDS}")
        return kv_cache.mix(self, hidden_states, **kwargs)

    def compute(self, hidden_states: Tensor, states: MixerStates, **kwargs: Any) -> Tensor:
        """Computes the mixer with these states: [rows, L, D] -> the same shape."""
        out: Tensor = self._checkpoint_wrapped_module(
            hidden_states=hidden_states, **kwargs | {self._cache_parameter: states}
        )
        return out


def cache_mixers(model: PreTrainedModel) -> None:
    """Wraps the sequence mixers of a model in CachedMixer, in place. Raises ModelError if one takes no cache, or this
    release of transformers expects another interface of the cache."""
    for path, mixer in sequence_mixers(model).items():
        names = [name for name in _CACHE_PARAMETERS if name in inspect.signature(mixer.forward).parameters]
        if not names or not hasattr(Cache, MixerStates.get_conv_state.__name__):
            reason = f"{type(model).__name__} is not supported: {type(mixer).__name__} takes no cache of ours"
            raise ModelError(with_release(reason))
        model.set_submodule(path, CachedMixer(mixer, names[0]))


def _first_tokens(places: list[int], length: int, tensor: Tensor) -> Tensor:
    return tensor[places, :length]


def _bound_time_steps(mixer: Any, _in_proj: nn.Module, _args: Any, projected: Tensor) -> None:
    """Bounds the time steps of a state space (Mamba-2), in place, before their softplus. transformers bounds them after
    the softplus for whole sequences, and not at all for a single further token.

    Args:
        projected: [rows, L, ...]; the last num_heads of each token are its time steps.
    """
    steps = projected[..., -mixer.num_heads :]
    limits = (_before_softplus(limit) - mixer.dt_bias for limit in mixer.time_step_limit)
    if (factors := getattr(mixer, "mup_vector", None)) is not None:  # Falcon-H1 multiplies by them after in_proj
        limits = (limit / factors[0, 0, -mixer.num_heads :] for limit in limits)
    least, most = (limit.to(steps.dtype) for limit in limits)
    torch.clamp(steps, min=least, max=most, out=steps)


def _before_softplus(value: float) -> float:
    """Returns the number whose softplus is `value`; -inf for 0."""
    return value + math.log(-math.expm1(-value)) if value > 0 else -math.inf


def _attend_among_blocks(
    query: Tensor, key: Tensor, value: Tensor, blocks: Tensor, *, window: int | None, **options: Any
) -> Tensor:
    """Computes `ops.attend` of prompts [P, H, L, d] whose tokens also see those of their block behind them. One prompt
    at a time: with a mask all scores may be in memory."""
    out = [
        attend(*one, mask=seen_among_blocks(own[None], window=window), **options)
        for *one, own in zip(query.split(1), key.split(1), value.split(1), blocks, strict=True)
    ]
    return torch.cat(out)


def _attend_as_pack(
    query: Tensor, key: Tensor, value: Tensor, *, scaling: float | None, window: int | None, sinks: Tensor | None
) -> Tensor:
    """Computes the same as `ops.attend`, [P, H, L, d] -> [P, H, L, d], in one variable-length FlashAttention call,
    which holds no scores in memory. The kernels behind `ops.attend` have no sinks, and with a mask group no queries."""
    count, _, length, _ = query.shape
    layout = PackedLayout.of_one_length(count, length, device=query.device)
    query, key, value = (tensor.transpose(0, 1).flatten(1, 2) for tensor in (query, key, value))
    out = varlen_attention(query, key, value, layout, scaling=scaling, window=window, softcap=None, sinks=sinks)
    return out.unflatten(1, (count, length)).transpose(0, 1)


def _cached_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Mask,
    *,
    kv_cache: KVCache | None = None,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    indices: KeyChoice | None = None,
    **_kwargs: Any,
) -> tuple[Tensor, None]:
    """The registered attention function: query [B, H, L, d], s_aux [H] -> [B, L, H, dv]. `indices` is given in layers
    with an indexer."""
    if indices is not None and torch.compiler.is_compiling():  # a graph cannot hold what is chosen
        kwargs = {"scaling": scaling, "sliding_window": sliding_window, "softcap": softcap, "s_aux": s_aux}
        return _uncompiled_attention(
            module, query, key, value, attention_mask, kv_cache=kv_cache, indices=indices, **kwargs
        )
    if kv_cache is None:
        raise ModelError(f"The family of {type(module).__name__} is not supported: it {DROPS_KEYWORDS}")
    if is_own_mask(attention_mask):
        raise ModelError(f"{type(module).__name__} is not supported: it {HAS_OWN_MASK}")
    if lacks_choice(module, indices):
        raise ModelError(f"The family of {type(module).__name__} is not supported: it {HIDES_CHOICE}")
    window, chunk = attention_span(module, attention_mask, sliding_window)
    layer: int = module.layer_idx  # type: ignore[assignment]
    options: dict[str, Any] = {"scaling": scaling, "window": window, "chunk": chunk, "softcap": softcap, "sinks": s_aux}
    if torch.compiler.is_compiling():
        out = _attend_in_graph(layer, query, key, value, **options)
    else:
        in_blocks = shows_blocks(module)
        out = kv_cache.attend(layer, query, key, value, choice=indices, in_blocks=in_blocks, **options)
    return out.transpose(1, 2).contiguous(), None  # some families call view on it


_uncompiled_attention = torch.compiler.disable(_cached_attention)


@torch.library.custom_op("shardwise::cached_attention", mutates_args=())
def _attend_in_graph(
    layer: int,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    scaling: float | None,
    window: int | None,
    chunk: int | None,
    softcap: float | None,
    sinks: Tensor | None,
) -> Tensor:
    """The attention that compiled forward passes call: a graph cannot hold the cache, so it looks up the one in use."""
    cache = _cache_in_use.get()
    return cache.attend(
        layer, query, key, value, scaling=scaling, window=window, chunk=chunk, softcap=softcap, sinks=sinks
    )


@_attend_in_graph.register_fake
def _attended_shape(layer: int, query: Tensor, key: Tensor, value: Tensor, *_options: Any) -> Tensor:
    return query.new_empty(*query.shape[:3], value.shape[-1])
