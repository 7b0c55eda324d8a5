"""One `generate` call of the embedded engine: waiting prompts, rows that are being decoded, and sampling for them.

Shapes: B active rows, V vocabulary.
"""

import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from shardwise.config import ConfigError, TrainingError
from shardwise.rollout.cached_model import CachedModel
from shardwise.rollout.free_memory import free_bytes
from shardwise.rollout.kv_cache import CacheSize, KVCache
from shardwise.rollout.sampling import Settings, sample, stream_key, uniforms
from shardwise.types import Completion, FinishReason, GenerateRequest

_ROWS_PER_SLOT = 8
"""One extra cache row per this many decode rows holds a prefilled prompt until all of its completions have begun."""


@dataclass(slots=True)
class Row:
    """A completion that is being decoded."""

    request: int
    index: int
    """The completion's number among those of its request."""
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    experts: list[Tensor] = field(default_factory=list)
    """Chosen experts, [tokens, M, k] for each forward pass; empty unless asked for."""

    def completion(self, finish_reason: FinishReason, version: int) -> Completion:
        """Returns what has been sampled, by the weights of `version`."""
        return Completion(
            token_ids=self.token_ids,
            logprobs=self.logprobs,
            finish_reason=finish_reason,
            policy_version=version,
            experts=torch.cat(self.experts) if self.experts else None,
        )


@dataclass(slots=True)
class _Prompt:
    """A prefilled prompt, kept until all of its completions have begun."""

    request: int
    members: range
    """Numbers of the completions that have not begun."""
    slot: int
    """The cache row that holds the prompt."""
    num_tokens: int
    ahead: Tensor
    """[] int64: a token's position id minus its index in the sequence; not 0 after images (M-RoPE)."""
    logits: Tensor
    """[V], logits for the first token of the completions."""
    experts: Tensor | None
    """Chosen experts, [tokens, M, k]; None unless asked for."""


class Decoding:
    """The state of one `generate` call: waiting prompts, rows being decoded, and the cache that they share."""

    def __init__(self, model: CachedModel, requests: Sequence[GenerateRequest]) -> None:
        """
        Raises:
            ConfigError: the device has no room for the cache.
        """
        self._model = model
        self._requests = requests
        self._waiting = deque(index for index, request in enumerate(requests) if request.num_completions)
        self._prompts: deque[_Prompt] = deque()
        """Prompts that are prefilled and whose completions have not all begun."""
        self.rows: list[Row] = []
        """The completions that are being decoded, by active cache row."""
        self._projection = model.projection()
        self._record = model.expert_record() if any(request.with_experts for request in requests) else None
        self._capacity = min(model.max_rows, sum(request.num_completions for request in requests))
        num_slots = min(len(self._waiting), -(-self._capacity // _ROWS_PER_SLOT))
        self._free_slots = list(range(self._capacity, self._capacity + num_slots))
        _require_room(model.cache_size, model.device, num_active=self._capacity, num_slots=num_slots, requests=requests)
        self._cache = KVCache(
            num_rows=self._capacity + num_slots,
            capacity_tokens=longest(requests),
            device=model.device,
            kernels=model.kernels,
        )
        # Per active row, on the device: the token to feed next, its index in the sequence, how far its position id is
        # ahead of that index (after images), the key of its random stream, how it is sampled.
        self._tokens, self._positions, self._ahead, self._keys = (
            torch.zeros(0, dtype=torch.int64, device=model.device) for _ in range(4)
        )
        self._settings = Settings.of([], model.device)

    def is_unfinished(self) -> bool:
        return bool(self._waiting or self._prompts or self.rows)

    def advance(self) -> list[tuple[Row, FinishReason]]:
        """Fills free rows, then samples one more token for every row. Returns the rows that finished, and why."""
        finished: list[tuple[Row, FinishReason]] = []
        while (self._waiting or self._prompts) and len(self.rows) < self._capacity:
            finished += self._admit()  # some end with their first token
        if self.rows:
            finished += self._decode()
        return finished

    def _admit(self) -> list[tuple[Row, FinishReason]]:
        """Begins completions in free rows, as many as there are of both, and samples their first tokens."""
        first_row, logits = len(self.rows), []
        while len(self.rows) < self._capacity and (self._prompts or self._waiting):
            if not self._prompts:
                self._read_prompts()
            prompt = self._prompts[0]
            members = prompt.members[: self._capacity - len(self.rows)]
            self._begin(prompt, members)
            logits.append(prompt.logits.expand(len(members), -1))
            prompt.members = prompt.members[len(members) :]
            if not prompt.members:
                self._free_slots.append(self._prompts.popleft().slot)
        return self._sample(torch.cat(logits), first_row)

    def _read_prompts(self) -> None:
        """Prefills as many waiting prompts as there are free slots, each prompt once."""
        admitted = [self._waiting.popleft() for _ in range(min(len(self._waiting), len(self._free_slots)))]
        slots = [self._free_slots.pop() for _ in admitted]
        of_prompts = [self._requests[index] for index in admitted]
        prompts = [torch.tensor(request.prompt_ids + request.partial_token_ids) for request in of_prompts]
        device = self._model.device
        padded = torch.nn.utils.rnn.pad_sequence(prompts, batch_first=True).to(device)
        lengths = torch.tensor([len(prompt) for prompt in prompts], device=device)
        positions = torch.arange(padded.shape[1], device=device).expand_as(padded)
        ahead, blocks = torch.zeros_like(lengths), None
        images = [request.images for request in of_prompts]
        shown = [one for one in images if one is not None]
        if self._model.sight is not None and shown:
            positions, ahead = self._model.sight.places(prompts, images)
            blocks = self._model.sight.blocks(prompts)
        self._cache.begin_prefill(torch.tensor(slots, device=device), [len(prompt) for prompt in prompts], blocks)
        hidden = self._model.hidden_states(padded, positions, self._cache, shown)
        last = hidden[torch.arange(len(prompts), device=device), lengths - 1]
        logits = self._model.logits(last, self._projection)
        experts = None if self._record is None else self._record.take().unflatten(0, padded.shape)
        for place, (index, slot, prompt) in enumerate(zip(admitted, slots, prompts, strict=True)):
            self._prompts.append(
                _Prompt(
                    request=index,
                    members=range(self._requests[index].num_completions),
                    slot=slot,
                    num_tokens=len(prompt),
                    ahead=ahead[place],
                    logits=logits[place],
                    experts=None if experts is None else experts[place, : len(prompt)],
                )
            )

    def _begin(self, prompt: _Prompt, members: range) -> None:
        """Appends a row for each of these completions of a prompt."""
        device, request = self._model.device, self._requests[prompt.request]
        first_row, num_rows = len(self.rows), len(members)
        self._cache.copy_prompt(prompt.slot, slice(first_row, first_row + num_rows), prompt.num_tokens)
        keys = []
        for index in members:
            self.rows.append(Row(prompt.request, index))
            if prompt.experts is not None:
                self.rows[-1].experts.append(prompt.experts)
            keys.append(stream_key(request.seed, request.uid, request.first_index + index))
        self._keys = torch.cat([self._keys, torch.tensor(keys, dtype=torch.int64, device=device)])
        self._settings = self._settings.then(Settings.of([request] * num_rows, device))
        self._positions = torch.cat([self._positions, self._positions.new_full((num_rows,), prompt.num_tokens)])
        self._ahead = torch.cat([self._ahead, prompt.ahead.expand(num_rows)])
        self._tokens = torch.cat([self._tokens, self._tokens.new_zeros(num_rows)])

    def _decode(self) -> list[tuple[Row, FinishReason]]:
        span = max(_num_given(self._requests[row.request]) + len(row.token_ids) for row in self.rows)
        self._cache.begin_decode(self._positions, span=span)
        positions = self._positions + self._ahead
        hidden = self._model.hidden_states(self._tokens[:, None], positions[:, None], self._cache)
        self._positions = self._positions + 1
        if self._record is not None:
            for row, experts in zip(self.rows, self._record.take(), strict=True):
                row.experts.append(experts[None])
        return self._sample(self._model.logits(hidden[:, 0], self._projection), 0)

    def _sample(self, logits: Tensor, first_row: int) -> list[tuple[Row, FinishReason]]:
        """Samples a token for each row from `first_row` on, and removes finished rows."""
        positions, keys = self._positions[first_row:], self._keys[first_row:]
        tokens, logprobs = sample(
            logits,
            self._settings[first_row:],
            uniforms(keys, positions),
            banned=self._model.banned,
        )
        self._tokens[first_row:] = tokens
        finished: dict[int, FinishReason] = {}
        steps = zip(tokens.tolist(), logprobs.tolist(), strict=True)
        for slot, (token, logprob) in enumerate(steps, start=first_row):
            row = self.rows[slot]
            request = self._requests[row.request]
            if math.isnan(logprob):
                raise TrainingError(
                    f"the policy gives no distribution for token {len(row.token_ids)} of a completion of "
                    f"{request.uid}: logits that are no numbers; weights or activations have "
                    "overflowed (engine.param_dtype=float16 does so first; bfloat16 and float32 reach further)"
                )
            row.token_ids.append(token)
            row.logprobs.append(logprob)
            stop = self._model.is_stopped(row.token_ids, request.stop, begun=request.partial_token_ids)
            if stop or len(row.token_ids) == request.max_tokens:
                finished[slot] = "stop" if stop else "length"
        rows = [(self.rows[slot], reason) for slot, reason in finished.items()]
        if finished:
            self._remove(sorted(finished))
        return rows

    def _remove(self, slots: list[int]) -> None:
        """Removes rows and fills the gaps with the last rows, so that active rows stay 0 .. B - 1."""
        remaining = len(self.rows) - len(slots)
        gaps = [slot for slot in slots if slot < remaining]
        gone = set(slots)
        movers = [slot for slot in range(remaining, len(self.rows)) if slot not in gone]
        if gaps:
            source, target = (torch.tensor(x, device=self._model.device) for x in (movers, gaps))
            self._cache.move_rows(source, target)
            for per_row in (self._tokens, self._positions, self._ahead, self._keys):
                per_row[target] = per_row[source]
            self._settings = self._settings.moved(source, target)
            for mover, gap in zip(movers, gaps, strict=True):
                self.rows[gap] = self.rows[mover]
        del self.rows[remaining:]
        self._tokens, self._positions = self._tokens[:remaining], self._positions[:remaining]
        self._ahead, self._keys = self._ahead[:remaining], self._keys[:remaining]
        self._settings = self._settings[:remaining]


def _require_room(
    size: CacheSize, device: torch.device, *, num_active: int, num_slots: int, requests: Sequence[GenerateRequest]
) -> None:
    """Raises ConfigError if a cache with this many rows would take more memory than is free."""
    row_bytes, free = size.row_bytes(longest(requests)), free_bytes(device)
    needed = (num_active + num_slots) * row_bytes
    if free is None or needed <= free:
        return
    num_fitting = free // row_bytes * _ROWS_PER_SLOT // (_ROWS_PER_SLOT + 1)
    fewer = f"set rollout.max_concurrent_sequences to {num_fitting} or less, or " if num_fitting else ""
    raise ConfigError(
        f"rollout.max_concurrent_sequences: keys and values of {num_active} sequences at a time and {num_slots} "
        f"prompts that wait, {longest(requests)} tokens each, take {needed / 2**30:.2f} GiB, and {device} has "
        f"{free / 2**30:.2f} GiB free; {fewer}lower data.max_prompt_tokens or rollout.max_response_tokens"
    )


def _num_given(request: GenerateRequest) -> int:
    """Number of tokens that the sampled ones follow: the prompt and the partial completion."""
    return len(request.prompt_ids) + len(request.partial_token_ids)


def longest(requests: Sequence[GenerateRequest]) -> int:
    """Largest number of tokens that any request may reach: its given tokens and its max_tokens."""
    return max((_num_given(request) + request.max_tokens for request in requests), default=0)
