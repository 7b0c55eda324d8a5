"""The states that a sequence mixer (linear attention, a state space, a short convolution) carries from token to token,
for every row that the embedded engine decodes."""

from collections.abc import Iterator, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor


class MixerStates:
    """The states of one layer, R rows of each, with the methods that transformers' mixers call on their cache.

    A call of the mixer either begins sequences (after `begin`) or appends one token to each (after `go_on`).
    """

    def __init__(self, num_rows: int) -> None:
        self._num_rows = num_rows
        self._states: dict[tuple[str, int], Tensor] = {}
        """[R, ...], by kind ("conv" or "recurrent") and number among those of its kind."""
        self._rows: Tensor | slice = slice(0)
        self._begins = True

    def begin(self, rows: Tensor) -> None:
        """Makes the next call read whole prompts, whose states are kept in `rows`."""
        self._rows, self._begins = rows, True

    def go_on(self, num_rows: int) -> None:
        """Makes the next call read one token of each of the rows 0 .. num_rows - 1."""
        self._rows, self._begins = slice(num_rows), False

    def tensors(self) -> Iterator[Tensor]:
        """Yields all states, [R, ...] each."""
        yield from self._states.values()

    def get_conv_state(self, layer_idx: int, state_idx: int = 0) -> Tensor | None:
        """Returns the state [rows, channels, kernel size], which a mixer may change in place; None at the beginning of
        a sequence."""
        return self._get("conv", state_idx)

    def update_conv_state(
        self, conv_states: Tensor, layer_idx: int, state_idx: int = 0, *, conv_kernel_size: int
    ) -> Tensor:
        """Appends conv_states [rows, channels, tokens] to the kept state and returns the whole; keeps its last
        conv_kernel_size tokens."""
        before = self._get("conv", state_idx)
        whole = conv_states if before is None else torch.cat([before, conv_states], dim=-1)
        self._set("conv", state_idx, F.pad(whole, (conv_kernel_size - whole.shape[-1], 0)))  # or cuts, if negative
        return whole

    def get_recurrent_state(self, layer_idx: int, state_idx: int = 0) -> Tensor | None:
        """Returns the state [rows, ...], or None at the beginning of a sequence."""
        return self._get("recurrent", state_idx)

    def update_recurrent_state(self, recurrent_states: Tensor, layer_idx: int, state_idx: int = 0) -> Tensor:
        """Keeps recurrent_states [rows, ...] and returns them."""
        self._set("recurrent", state_idx, recurrent_states)
        return recurrent_states

    def is_recording_past(self, layer_idx: int) -> bool:
        """False: states are never rolled back here."""
        return False

    def _get(self, kind: str, index: int) -> Tensor | None:
        state = None if self._begins else self._states.get((kind, index))
        return None if state is None else state[self._rows]

    def _set(self, kind: str, index: int, value: Tensor) -> None:
        if (kind, index) not in self._states:
            self._states[kind, index] = value.new_zeros(self._num_rows, *value.shape[1:])
        self._states[kind, index][self._rows] = value


def places_by_length(lengths: Sequence[int]) -> dict[int, list[int]]:
    """Groups sequences that a mixer can read together: those of one length, because it would take padding for tokens.

    Example: lengths 3, 5, 3: `{3: [0, 2], 5: [1]}`.
    """
    places: dict[int, list[int]] = {}
    for place, length in enumerate(lengths):
        places.setdefault(length, []).append(place)
    return places
