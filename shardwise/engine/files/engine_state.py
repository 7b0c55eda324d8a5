"""The training state of an engine: what it writes into a checkpoint, and resumes from."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import Tensor

from shardwise.engine.files.initial_weights import InitialWeights
from shardwise.engine.files.loading import load_weights
from shardwise.engine.files.staging import Copies, StagingBuffers
from shardwise.engine.heads import LogprobHead
from shardwise.engine.model import ScoringModel
from shardwise.engine.optim.optimizer import ShardedOptimizer
from shardwise.engine.runtime_state import has_adapters, trained_names

if TYPE_CHECKING:
    from shardwise.engine.files.checkpoint import StagedState


class EngineState:
    """Masters, optimizer states and numbers of a trained engine, for any layout. `load_initial_weights`, `save`, `load`
    and `load_weights_alone` are collective; the other methods are local."""

    # `checkpoint` needs xxhash and nothing else in the engine does, so it is imported where it is used.

    def __init__(
        self, model: ScoringModel, optimizer: ShardedOptimizer, copies: Copies, initial: InitialWeights | None = None
    ) -> None:
        """
        Args:
            copies: copies that may still be on their way from the device; nothing is loaded before they have arrived.
            initial: what the trained weights may be read from, where the model has none yet.
        """
        self._model = model
        self._optimizer = optimizer
        self._copies = copies
        self._initial = initial
        self._buffers = StagingBuffers(copies)

    @property
    def has_weights(self) -> bool:
        """Whether the trained weights have been loaded."""
        return self._initial is None

    def require_weights(self) -> None:
        """Asserts that the trained weights have been loaded: before that their memory holds nothing of use."""
        assert self.has_weights, "no trained weight has been loaded"

    def load_initial_weights(self) -> int:
        """Loads the trained weights of the model folder, or of a new adapter. Returns the bytes that this rank read."""
        assert self._initial is not None, "they are there already"
        num_bytes = self._initial.load_trained()
        self._initial = None
        return num_bytes

    def numbers(self) -> dict[str, Any]:
        """What the state holds beside tensors (step counts, loss scale), JSON-serializable."""
        return self._optimizer.numbers()

    def load_numbers(self, numbers: Mapping[str, Any]) -> None:
        """Takes over the `numbers` of another engine of this kind."""
        self._optimizer.load_numbers(numbers)

    def save(self, folder: Path, *, meanwhile: Callable[[], object] = lambda: None) -> None:
        """Writes the whole state. See `checkpoint.save_state`."""
        from shardwise.engine.files.checkpoint import save_state

        self.require_weights()
        save_state(self._optimizer, folder, meanwhile=meanwhile)

    def stage(self) -> "StagedState":
        """Copies what `save` would write to host memory, so that it can be written while training goes on. Whatever
        changes weights waits until the copies are made. The next call overwrites them."""
        from shardwise.engine.files.checkpoint import StagedState

        self.require_weights()
        return StagedState.of(self._optimizer, self._buffers)

    def load(self, folder: Path) -> None:
        """Verifies and loads what an engine of any layout wrote there. See `checkpoint.load_state`."""
        from shardwise.engine.files.checkpoint import load_state

        self._copies.wait()
        load_state(self._optimizer, folder, into_empty=not self.has_weights)
        self._initial = None

    def load_weights_alone(self, weights: Path, state: Path) -> None:
        """Loads trained weights and numbers; optimizer states begin anew. Frozen weights stay as they are.

        Args:
            weights: the folder that `export_hf` wrote, rounded to engine.param_dtype, or, where adapters are trained,
                `export_adapter`.
            state: what `save` wrote, of which only the numbers beside the tensors are read.
        Raises:
            ModelError: on every rank: the weights or the numbers cannot be read, or are of another engine.
        """
        from shardwise.engine.files.checkpoint import read_numbers

        self._copies.wait()
        numbers, model = read_numbers(self._optimizer, state), self._model.hf_model
        if has_adapters(model):
            from shardwise.engine.files.adapters import load_adapter

            load_adapter(model, weights)
        else:
            fresh: dict[str, Tensor] | None = None if isinstance(self._model.head, LogprobHead) else {}
            load_weights(model, weights, fresh=fresh, only=trained_names(model))
        self._initial = None
        self._optimizer.drop_states()
        self._optimizer.load_numbers(numbers)
