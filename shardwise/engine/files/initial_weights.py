"""What a model starts with: its folder's weights, and a new adapter or one that was trained before."""

from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path

from torch import Tensor
from transformers import PreTrainedModel

from shardwise.config import LoraConfig
from shardwise.engine.files.loading import load_weights
from shardwise.engine.runtime_state import runtime_state, trained_names


@dataclass(frozen=True, slots=True, kw_only=True)
class InitialWeights:
    """Initial weights of a model that has memory for its parameters, but nothing in it yet. Every method is collective,
    returns the bytes of the folder that this rank read, and raises ModelError on every rank as `load_weights` does."""

    model: PreTrainedModel
    folder: Path
    fresh: dict[str, Tensor] | None
    """For a value head: see `load_weights`."""
    lora: LoraConfig | None
    """The settings of the adapters; None without any."""
    seed: int
    """Seeds a new adapter."""
    require_finite: bool
    """False also loads weights and adapters that hold NaN or infinities."""

    def load(self) -> int:
        """Loads everything."""
        return self._read() + self._load_adapters()

    def load_untrained(self) -> int:
        """Loads what no training state holds, and checks the names, shapes and dtypes of all that the folder has."""
        return self._read(only=runtime_state(self.model).keys() - trained_names(self.model))

    def load_trained(self) -> int:
        """Loads the rest: the trained weights, or the adapters."""
        return self._read(only=trained_names(self.model)) if self.lora is None else self._load_adapters()

    def _load_adapters(self) -> int:
        if self.lora is None:
            return 0
        from shardwise.engine.files.adapters import init_adapters, load_adapter  # importing peft takes seconds

        if self.lora.adapter_path is not None:
            load_adapter(self.model, Path(self.lora.adapter_path), require_finite=self.require_finite)
            return 0
        init_adapters(self.model, self.seed)
        return self._read(copies=True)

    def _read(self, *, only: Collection[str] | None = None, copies: bool = False) -> int:
        return load_weights(
            self.model,
            self.folder,
            fresh=self.fresh,
            require_finite=self.require_finite,
            only=only,
            copies=copies,
        )
