"""Loads a checkpoint into the engines of a run."""

from collections.abc import Collection, Mapping
from pathlib import Path

from shardwise.config import ModelError
from shardwise.recipes.checkpointing.engine_files import state_subfolder
from shardwise.recipes.engines import RemoteEngine


class Loader:
    """The CheckpointReader that `find_start` loads a run's engines with."""

    def __init__(self, engines: Mapping[str, RemoteEngine]) -> None:
        """
        Args:
            engines: as `Saver` takes them.
        """
        self._engines = engines

    def verify(self, checkpoint: Path) -> None:
        """Raises ModelError: a file is damaged. Shards of training states are left to `load`."""
        damage, *_ = self._engines[""].group.call("verify_files", str(checkpoint))
        if damage is not None:
            raise ModelError(damage)

    def load(self, checkpoint: Path) -> dict[str, str]:
        """Loads the training state of every engine. See `CheckpointReader`."""
        damage = {}
        for engine in self._engines.values():
            state = checkpoint / state_subfolder(engine)
            if (found := engine.load_state(str(state))) is not None:
                damage[state.name] = found
        return damage

    def load_weights_alone(self, checkpoint: Path, lost: Collection[str]) -> None:
        """Loads only weights into engines whose training states are lost; their optimizer states start anew."""
        for name, engine in self._engines.items():
            state = checkpoint / state_subfolder(engine)
            if state.name in lost:
                engine.load_weights_alone(str(checkpoint / name), str(state))
