"""The loss scale of float16 training: small gradients are multiplied out of the range that float16 flushes to zero."""

from typing import TypedDict

INITIAL_SCALE = 2.0**16
MINIMUM_SCALE = 1.0
GROWTH_FACTOR = 2.0
BACKOFF_FACTOR = 0.5
GROWTH_INTERVAL_STEPS = 2000


class LossScalerState(TypedDict):
    """What a training state keeps of a LossScaler.

    Example: `{"scale": 32768.0, "num_finite_in_a_row": 17}`
    """

    scale: float
    num_finite_in_a_row: int


class LossScaler:
    """Dynamic loss scaling with the defaults of torch.amp.GradScaler (Micikevicius et al. 2018).

    It differs from GradScaler in who decides that a step overflowed: the caller, by the global gradient norm, which is
    the same number on every rank. So every rank holds the same scale without a collective of its own, and shards whose
    rank saw no overflow are skipped with the others.
    """

    def __init__(self) -> None:
        self.scale = INITIAL_SCALE
        """What the loss is multiplied by. A power of two, so that dividing gradients by it is exact."""
        self._num_finite_in_a_row = 0

    @property
    def is_at_minimum(self) -> bool:
        """Whether the scale can get no smaller, so that no smaller one can cure an overflow."""
        return self.scale <= MINIMUM_SCALE

    def update(self, *, finite: bool) -> None:
        """Called once per optimizer step: halves the scale after an overflow, doubles it after 2000 finite steps in a
        row."""
        if not finite:
            self.scale = max(MINIMUM_SCALE, self.scale * BACKOFF_FACTOR)
            self._num_finite_in_a_row = 0
            return
        self._num_finite_in_a_row += 1
        if self._num_finite_in_a_row == GROWTH_INTERVAL_STEPS:
            self.scale *= GROWTH_FACTOR
            self._num_finite_in_a_row = 0

    def state_dict(self) -> LossScalerState:
        return {"scale": self.scale, "num_finite_in_a_row": self._num_finite_in_a_row}

    def load_state_dict(self, state: LossScalerState) -> None:
        self.scale = state["scale"]
        self._num_finite_in_a_row = state["num_finite_in_a_row"]
