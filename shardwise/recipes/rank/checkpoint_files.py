"""One rank's part in the files of checkpoints and exports."""

import socket
from pathlib import Path
from typing import Any

import torch

from shardwise.config import DamagedError, EngineConfig, ModelConfig, ModelError
from shardwise.data import load_tokenizer
from shardwise.engine import Part, rewrite_folder, written_on_every_rank
from shardwise.recipes.checkpointing.checkpoint_writer import CheckpointWriter
from shardwise.recipes.checkpointing.checkpoints import ADAPTER, WEIGHTS
from shardwise.recipes.checkpointing.manifest import hash_files, verify_share
from shardwise.recipes.rank.hosted_engines import HostedEngines


class CheckpointFiles:
    """Saves this rank's engines, stages them for its CheckpointWriter, loads them, and looks after what is on disk."""

    def __init__(self, engines: HostedEngines, writer: CheckpointWriter | None) -> None:
        """
        Args:
            writer: writes the checkpoints that are staged here; None: nothing is staged.
        """
        self._engines = engines
        self._writer = writer

    def nonfinite_tensors(self, role: str) -> list[str]:
        """Returns names of the weights and optimizer states whose part on this rank holds NaN or an infinity."""
        return self._engines.take_device(role, "params", "optimizer").engine.nonfinite_tensors()

    def save(self, role: str, model: str, folder: str, state: str = "") -> None:
        """Writes an engine's weights into `folder`: into hf/, and adapter/ if it has one. Meanwhile writes its training
        state into the folder `state`, if one is named."""
        parts: list[Part] = ["params", "optimizer"] if state else ["params"]
        hosted = self._engines.take_device(role, *parts)
        assert isinstance(hosted.config, EngineConfig), f"{role} is not trained"
        engine, lora, config = hosted.engine, hosted.config.lora, ModelConfig.model_validate_json(model)

        def save_weights() -> None:
            if lora is None or lora.save_merged:
                engine.export_hf(Path(folder) / WEIGHTS, load_tokenizer(config))
            if lora is not None:
                engine.export_adapter(Path(folder) / ADAPTER, config.path)

        if state:
            engine.state.save(Path(state), meanwhile=save_weights)
        else:
            save_weights()

    def stage_weights(self, role: str, model: str, subfolder: str) -> None:
        """Begins to copy an engine's weights to host memory, for the CheckpointWriter."""
        hosted, writer = self._engines.take_device(role, "params"), self._checkpoint_writer()
        assert isinstance(hosted.config, EngineConfig), f"{role} is not trained"
        config, lora = ModelConfig.model_validate_json(model), hosted.config.lora
        if lora is None or lora.save_merged:
            writer.add_export(role, str(Path(subfolder) / WEIGHTS), hosted.engine.stage_export(), config)
        if lora is not None:
            writer.add_adapter(role, str(Path(subfolder) / ADAPTER), hosted.engine.stage_adapter(config.path))

    def stage_state(self, role: str, subfolder: str) -> None:
        """Begins to copy an engine's training state to host memory, for the CheckpointWriter."""
        hosted = self._engines.take_device(role, "params", "optimizer")
        self._checkpoint_writer().add_state(role, subfolder, hosted.engine.state.stage())

    def load_state(self, role: str, folder: str) -> str | None:
        """Loads a training state. Returns what is damaged, the same on every rank; None if nothing is. Raises
        ModelError on every rank if it does not fit."""
        try:
            self._engines.take_device(role, "params", "optimizer").engine.state.load(Path(folder))
        except DamagedError as error:
            return str(error)
        return None

    def load_weights_alone(self, role: str, folder: str, state: str) -> None:
        """Loads the weights that `save` wrote into `folder`. See `EngineState.load_weights_alone`."""
        hosted = self._engines.take_device(role, "params", "optimizer")
        assert isinstance(hosted.config, EngineConfig), f"{role} is not trained"
        weights = WEIGHTS if hosted.config.lora is None else ADAPTER
        hosted.engine.state.load_weights_alone(Path(folder) / weights, Path(state))

    def hash_files(self, share: list[str], checkpoint: str) -> dict[str, dict[str, Any]]:
        """Hashes this rank's share of a checkpoint's files for its manifest. Raises ExportError on every rank if one
        cannot be read."""
        with written_on_every_rank(Path(checkpoint)):
            return hash_files(share, Path(checkpoint))

    def verify_files(self, checkpoint: str) -> str | None:
        """Compares this rank's share of a checkpoint's files, except shards of training states, with what was written.
        Returns what is damaged, the same on every rank; None if nothing is."""
        try:
            verify_share(Path(checkpoint), with_shards=False)
        except ModelError as error:
            return str(error)
        return None

    def sees(self, path: str) -> str | None:
        """Returns None if this host sees the file, else the host's name."""
        return None if Path(path).is_file() else socket.gethostname()

    def export_model(self, model: str, adapter: str, target: str, dtype: str, max_shard_size: str) -> None:
        """Loads a model folder, and an adapter folder if one is named, and writes them in `dtype`; builds no engine."""
        config = ModelConfig.model_validate_json(model)
        rewrite_folder(
            Path(config.path),
            Path(target),
            load_tokenizer(config),
            getattr(torch, dtype),
            max_shard_size=max_shard_size,
            device=self._engines.device,
            adapter=Path(adapter) if adapter else None,
        )

    def _checkpoint_writer(self) -> CheckpointWriter:
        assert self._writer is not None, "nothing on this rank writes in the background"
        return self._writer
