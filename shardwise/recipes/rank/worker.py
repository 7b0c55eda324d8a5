"""The object that lives on every rank: its engines, and the methods that the controller calls on them."""

import socket
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from shardwise.config import (
    DamagedError,
    DataError,
    EngineConfig,
    ExportError,
    FrozenEngineConfig,
    LoraConfig,
    ModelConfig,
    ModelError,
    OptimizerConfig,
    SamplingConfig,
    UserError,
)
from shardwise.console import warn
from shardwise.controller.watchdog import go_on
from shardwise.data import ImageReader, load_tokenizer
from shardwise.engine import (
    Part,
    TeacherOutputs,
    TrainEngine,
    named_failures,
    raised_on_every_rank,
    rewrite_folder,
)
from shardwise.fault_plan import fault_point
from shardwise.memfd import SharedTensors
from shardwise.ops import release_cached_blocks
from shardwise.recipes.bundles import MAX_BUNDLES, LossSource, SkippedStep, write_bundle
from shardwise.recipes.checkpointing.checkpoint_writer import CheckpointWriter
from shardwise.recipes.checkpointing.manifest import hash_share, verify_share
from shardwise.recipes.engine_source import EngineSource
from shardwise.recipes.losses import SFT_LOSS, Loss, LossKind
from shardwise.recipes.rank.rollout_engines import build_rollout
from shardwise.recipes.sampling.sampled_tokens import with_spans
from shardwise.region import Region
from shardwise.rollout import EmbeddedEngine, RolloutEngine, SupervisedEngine, VllmEngine
from shardwise.transfer import (
    Assembly,
    DeltaDecoder,
    DeltaEncoder,
    Medium,
    SyncReceipt,
    pull_weights,
    push_weights,
    seconds_per_byte_inside,
    seconds_per_byte_sent,
    sync_local,
    take_pieces,
)
from shardwise.types import (
    Completion,
    Denominators,
    GenerateRequest,
    ImageRef,
    Images,
    Metrics,
    TokenBatch,
    WeightSender,
)

POLICY = "policy"
"""The role of the engine whose weights the rollout engine serves."""
OF_MAIN_SECTION = (POLICY, "student", "reward model")
"""Roles whose engine has its options under `engine`, where its errors say they are."""


@dataclass(slots=True)
class HostedEngine:
    """An engine of this rank, its loss, and how it shares the device with the others."""

    engine: TrainEngine
    source: EngineSource
    reader: ImageReader | None = None
    """Reads images for the model; None if it sees none."""
    loss: Loss = SFT_LOSS
    loss_source: LossSource = field(default_factory=LossSource)

    @property
    def config(self) -> EngineConfig | FrozenEngineConfig:
        return self.source.layout

    @property
    def options(self) -> dict[str, Any]:
        """Options of a forward pass that the loss needs."""
        return {
            "temperature": self.source.temperature,
            "with_logprobs": self.loss.with_logprobs,
            "with_entropy": self.loss.with_entropy,
        }

    def read(self, batches: list[TokenBatch], *, whole: bool = False) -> list[TokenBatch]:
        """Collective. Returns the batches with those of their images read that this rank looks at.

        Args:
            whole: reads all images.
        Raises:
            DataError: on every rank: a rank has an image that cannot be decoded.
        """
        if self.reader is None:
            return batches
        with raised_on_every_rank(DataError):
            return [self._read(self.reader, batch, whole) if batch.image_refs else batch for batch in batches]

    def _read(self, reader: ImageReader, batch: TokenBatch, whole: bool) -> TokenBatch:
        own = range(len(batch.image_refs)) if whole else self.engine.own_images(batch.image_refs)
        images = reader.read(batch.image_refs[own.start : own.stop]) if own else None
        return replace(batch, images=images, image_refs=[] if len(own) == len(batch.image_refs) else batch.image_refs)

    @property
    def parts_to_offload(self) -> list[Part]:
        """The parts that leave the device while the engine does not work."""
        parts: list[Part] = ["params"] if self.config.param_offload else []
        if isinstance(self.config, EngineConfig) and self.config.optimizer_offload:
            parts.append("optimizer")
        return parts


@dataclass(frozen=True, slots=True)
class AdapterSender:
    """Sends what an adapter file of the engine would hold, under peft's names."""

    engine: TrainEngine

    def named_weights(self, dtype: torch.dtype) -> Iterator[tuple[str, torch.Tensor]]:
        """See WeightSender."""
        return self.engine.adapter_weights(dtype)


@dataclass(frozen=True, slots=True)
class NeededSender:
    """Sends what the rollout engine's part on each rank needs of the weights."""

    engine: TrainEngine
    needed: Mapping[str, Region]

    def named_weights(self, dtype: torch.dtype) -> Iterator[tuple[str, torch.Tensor]]:
        """See WeightSender."""
        return self.engine.needed_weights(dtype, self.needed)


class Worker:
    """One rank's engines, each with a role: policy, critic, reference and so on. Configs arrive as the JSON of their
    pydantic classes, because commands are plain data.

    Methods of engines are collective: the controller calls them on every rank. While one engine works, the parts named
    by param_offload and optimizer_offload are off the device: those of all other engines, and its own that it does not
    need.
    """

    def __init__(
        self,
        device: torch.device,
        *,
        join_medium: Callable[[], Medium] | None = None,
        writer: CheckpointWriter | None = None,
        interruption: threading.Event | None = None,
    ) -> None:
        """
        Args:
            join_medium: joins the medium that carries weights to ranks that only sample; None on ranks that neither
                send nor receive.
            writer: writes the checkpoints that are staged here; None: nothing is staged.
            interruption: once another thread sets it, `generate` returns the tokens it has; `pull_weights` clears it.
        """
        self._device = device
        self._writer = writer
        self._join_medium = join_medium
        self._interruption = interruption or threading.Event()
        self._medium: Medium | None = None
        self._engines: dict[str, HostedEngine] = {}
        self._rollout_engine: RolloutEngine | None = None
        self._rollout_reader: ImageReader | None = None
        self._syncs_adapter_only = False
        self._synced_version: int | None = None
        """Version of the last sync into this rank's own rollout engine; None once the policy is trained further."""
        self._memory: SharedTensors | None = None
        """The memory that holds the weights of this rank's rollout engine, if another rank may write into it."""
        self._encoder, self._decoder, self._assembly = DeltaEncoder(), DeltaDecoder(), Assembly()
        self._num_bundles = 0

    def build_engine(
        self,
        role: str,
        source: str,
        optimizer: str = "",
        total_steps: int = 1,
        with_trained: bool = True,
    ) -> tuple[int, ...]:
        """Builds the engine that an EngineSource describes.

        Args:
            optimizer: an OptimizerConfig for a trained engine; "" for a frozen one.
            total_steps: optimizer steps of the whole run, for the learning-rate schedule.
            with_trained: as for `TrainEngine.build`.
        Returns:
            The number of its parameters, the number of trained ones, and the bytes of weights that this rank read.
        """
        self._clear_device()
        opened = EngineSource.model_validate_json(source)
        with _naming(role):
            built = opened.build(
                self._device,
                optimizer=OptimizerConfig.model_validate_json(optimizer) if optimizer else None,
                total_steps=total_steps,
                with_trained=with_trained,
            )
        self._engines[role] = HostedEngine(built, opened, ImageReader.load(Path(opened.model.path)))
        return built.num_parameters, built.num_trained_parameters, built.num_bytes_read

    def load_initial_weights(self, role: str) -> int:
        """See `TrainEngine.load_initial_weights`. Returns the bytes of weights that this rank has read."""
        engine = self._take_device(role, "params").engine
        with _naming(role):
            engine.load_initial_weights()
        return engine.num_bytes_read

    def build_rollout(
        self, model: str, rollout: str, param_dtype: str, lora: str = "", shares_memory: bool = False
    ) -> None:
        """Builds this rank's rollout engine from the model folder, as a SamplingConfig says.

        Args:
            lora: a LoraConfig if weight syncs bring the adapter alone; "" if they bring the whole model.
            shares_memory: the rank that sends weights may write straight into the engine's memory, if the engine can
                share it.
        """
        self._clear_device()
        release_cached_blocks()  # an engine in another process takes free memory
        self._rollout_reader = ImageReader.load(Path(ModelConfig.model_validate_json(model).path))
        self._rollout_engine = build_rollout(
            ModelConfig.model_validate_json(model),
            SamplingConfig.model_validate_json(rollout),
            dtype=getattr(torch, param_dtype),
            device=self._device,
            lora=LoraConfig.model_validate_json(lora) if lora else None,
        )
        if shares_memory and isinstance(self._rollout_engine, EmbeddedEngine) and self._device.type == "cpu":
            self._memory = self._rollout_engine.share_weights()

    def sync_adapter_only(self) -> None:
        """Makes weight syncs bring only the policy's adapter from here on."""
        self._syncs_adapter_only = True

    def use_loss(self, role: str, kind: LossKind, config: str, numbers: dict[str, float]) -> None:
        """Replaces an engine's loss, cross-entropy at first, by another one of recipes/losses.py."""
        hosted, source = self._engines[role], LossSource(kind=kind, config=config, numbers=numbers)
        hosted.loss, hosted.loss_source = source.make(), source

    def train(
        self, batches: list[TokenBatch], denominators: Denominators, role: str, teacher: str = "", bundle: str = ""
    ) -> Metrics:
        """Makes one optimizer step on this rank's micro-batches.

        Args:
            teacher: the role of the engine it learns from, if it learns from one.
            bundle: the folder for the bundle that replays the step if it is skipped; "" keeps none.
        """
        batches = self._engines[role].read(batches)
        teacher_outputs = self._teacher_outputs(batches, role, teacher) if teacher else None
        hosted = self._take_device(role, "params", "optimizer")
        if role == POLICY:
            self._synced_version = None
        metrics = hosted.engine.forward_backward(
            batches, hosted.loss.function, denominators, **hosted.options, teacher_outputs=teacher_outputs
        )

        def keep(grad_norm: float, losses: list[float]) -> None:
            step = SkippedStep(
                role=role,
                engine=hosted.source,
                teacher=self._engines[teacher].source if teacher else None,
                loss=hosted.loss_source,
                numbers=hosted.engine.state.numbers(),
                denominators=denominators,
                grad_norm=grad_norm,
            )
            self._keep_step(Path(bundle), step, batches, losses, teacher_outputs)

        keeps = bundle and self._num_bundles < MAX_BUNDLES
        metrics |= hosted.engine.optim_step(on_fault=keep if keeps else None)
        return {name: value.host() for name, value in metrics.items()}

    def skip_step(self, role: str) -> Metrics:
        """Takes the place of an optimizer step without a trained token; see `TrainEngine.skip_step`."""
        return self._engines[role].engine.skip_step()

    def check_teacher(self, role: str, teacher: str) -> None:
        """Raises ModelError or ConfigError if an engine cannot learn from the distributions of its teacher."""
        self._engines[role].engine.check_teacher(self._engines[teacher].engine)

    def divergence(self, batches: list[TokenBatch], role: str, teacher: str) -> list[torch.Tensor]:
        """Returns [T] for every micro-batch: the divergence of an engine from its teacher, in nats."""
        teacher_outputs = self._teacher_outputs(batches, role, teacher)
        hosted = self._take_device(role, "params")
        outputs = hosted.engine.forward(batches, with_logprobs=False, teacher_outputs=teacher_outputs)
        return [out.divergence for out in outputs if out.divergence is not None]

    def score(
        self, batches: list[TokenBatch], role: str, with_adapters: bool, temperature: float | None = None
    ) -> list[torch.Tensor]:
        """Returns [T] for every micro-batch: logprobs of a language model, values of a critic, scores of a reward
        model. `temperature`: None: the rollout's."""
        hosted = self._take_device(role, "params")
        temperature = hosted.source.temperature if temperature is None else temperature
        batches = hosted.read(batches)
        outputs = hosted.engine.forward(batches, temperature=temperature, with_adapters=with_adapters)
        found = [out.values if out.logprobs is None else out.logprobs for out in outputs]
        scores = [values for values in found if values is not None]
        first_trained = int(batches[0].loss_mask.int().argmax())
        fault_point("logprob", scores[0][first_trained:])
        return scores

    def generate(self, requests: list[GenerateRequest]) -> list[list[Completion]]:
        """Returns completions of this rank's share of the requests; some are unfinished if `interruption` was set."""
        fault_point("rollout")
        requests = [self._seen(request) for request in requests]
        groups = self._awake_rollout().generate(
            requests, on_finished=lambda _: go_on(), is_interrupted=self._interruption.is_set
        )
        return [with_spans(request, group) for request, group in zip(requests, groups, strict=True)]

    def _seen(self, request: GenerateRequest) -> GenerateRequest:
        """Returns the request with its images read."""
        if not request.image_refs:
            return request
        return replace(request, images=self._rollout_images(request.image_refs), image_refs=[])

    def _rollout_images(self, image_refs: list[ImageRef]) -> Images | None:
        if not image_refs:
            return None
        assert self._rollout_reader is not None, f"{image_refs[0].name}: nothing here reads images"
        return self._rollout_reader.read(image_refs)

    def take_restarts(self) -> int:
        """Returns how often the rollout engine's process was replaced since the last call; 0 if it has no process of
        its own."""
        return self._rollout_engine.take_restarts() if isinstance(self._rollout_engine, SupervisedEngine) else 0

    def rollout_logprobs(self, sequences: list[list[int]], image_refs: list[list[ImageRef]]) -> list[list[float]]:
        """Returns the rollout engine's logprobs, at temperature 1, of the tokens after the first of each sequence.

        Args:
            image_refs: the images of each sequence.
        """
        return self._awake_rollout().logprobs(sequences, [self._rollout_images(refs) for refs in image_refs])

    def sync_weights(self, version: int) -> dict[str, Any]:
        """Brings the policy's weights into the rollout engine, verified. Returns the SyncReceipt."""
        fault_point("sync")
        return asdict(self._bring_weights(version))

    def measure_sync(self) -> float:
        """Measures the seconds per byte of weights into this rank's rollout engine, with nothing else to do."""
        return seconds_per_byte_inside(self._device)

    def measure_push(self) -> float | None:
        """Measures the seconds per byte through the medium to ranks that sample; None on ranks that send nothing."""
        medium = self._joined_medium()
        return None if medium is None else seconds_per_byte_sent(medium)

    def measure_pull(self) -> None:
        """Receives what `measure_push` sends."""
        medium = self._joined_medium()
        assert medium is not None, "this rank is no end of what carries weights"
        take_pieces(medium, is_exposed=self._memory is not None)

    def push_weights(self, version: int, delta: bool) -> dict[str, Any] | None:
        """Sends the policy's weights to the ranks that sample. Returns the SyncReceipt on the rank that sends.

        Args:
            delta: sends only what has changed if they hold the version before.
        """
        fault_point("sync")
        hosted = self._take_device(POLICY, "params")
        dtype = getattr(torch, hosted.config.param_dtype)
        encoder = self._encoder if delta else None
        receipt = push_weights(self._sender(hosted), self._joined_medium(), version=version, dtype=dtype, delta=encoder)
        return None if receipt is None else asdict(receipt)

    def pull_weights(self, version: int, delta: bool) -> dict[str, Any]:
        """Loads the weights that `push_weights` sends with the same `delta`, verified. Returns the SyncReceipt."""
        fault_point("sync")
        self._interruption.clear()
        medium = self._joined_medium()
        assert self._rollout_engine is not None
        assert medium is not None, "this rank is no end of what carries weights"
        decoder = self._decoder if delta else None
        receipt = pull_weights(
            self._rollout_engine, medium, version=version, delta=decoder, assembly=self._assembly, memory=self._memory
        )
        return asdict(receipt)

    def nonfinite_tensors(self, role: str) -> list[str]:
        """Returns names of the weights and optimizer states whose part on this rank holds NaN or an infinity."""
        return self._take_device(role, "params", "optimizer").engine.nonfinite_tensors()

    def save(self, role: str, model: str, folder: str, state: str = "") -> None:
        """Writes an engine's weights into `folder`: into hf/, and adapter/ if it has one. Meanwhile writes its training
        state into the folder `state`, if one is named."""
        hosted = self._take_device(role, "params", "optimizer") if state else self._take_device(role, "params")
        assert isinstance(hosted.config, EngineConfig), f"{role} is not trained"
        engine, lora, config = hosted.engine, hosted.config.lora, ModelConfig.model_validate_json(model)

        def save_weights() -> None:
            if lora is None or lora.save_merged:
                engine.export_hf(Path(folder) / "hf", load_tokenizer(config))
            if lora is not None:
                engine.export_adapter(Path(folder) / "adapter", config.path)

        if state:
            engine.state.save(Path(state), meanwhile=save_weights)
        else:
            save_weights()

    def stage_weights(self, role: str, model: str, subfolder: str) -> None:
        """Begins to copy an engine's weights to host memory, for the CheckpointWriter."""
        hosted, writer = self._take_device(role, "params"), self._checkpoint_writer()
        assert isinstance(hosted.config, EngineConfig), f"{role} is not trained"
        config, lora = ModelConfig.model_validate_json(model), hosted.config.lora
        if lora is None or lora.save_merged:
            writer.add_export(role, str(Path(subfolder) / "hf"), hosted.engine.stage_export(), config)
        if lora is not None:
            writer.add_adapter(role, str(Path(subfolder) / "adapter"), hosted.engine.stage_adapter(config.path))

    def stage_state(self, role: str, subfolder: str) -> None:
        """Begins to copy an engine's training state to host memory, for the CheckpointWriter."""
        hosted = self._take_device(role, "params", "optimizer")
        self._checkpoint_writer().add_state(role, subfolder, hosted.engine.state.stage())

    def load_state(self, role: str, folder: str) -> str | None:
        """Loads a training state. Returns what is damaged, the same on every rank; None if nothing is. Raises
        ModelError on every rank if it does not fit."""
        try:
            self._take_device(role, "params", "optimizer").engine.state.load(Path(folder))
        except DamagedError as error:
            return str(error)
        return None

    def load_weights_alone(self, role: str, folder: str, state: str) -> None:
        """See `EngineState.load_weights_alone`."""
        engine = self._take_device(role, "params", "optimizer").engine
        engine.state.load_weights_alone(Path(folder), Path(state))

    def hash_files(self, checkpoint: str) -> dict[str, dict[str, Any]]:
        """Hashes this rank's share of a checkpoint's files for its manifest. Raises ExportError on every rank if one
        cannot be read."""
        with raised_on_every_rank(ExportError), named_failures(Path(checkpoint)):
            return hash_share(Path(checkpoint))

    def sees(self, path: str) -> str | None:
        """Returns None if this host sees the file, else the host's name."""
        return None if Path(path).is_file() else socket.gethostname()

    def verify_files(self, checkpoint: str) -> str | None:
        """Compares this rank's share of a checkpoint's files, except shards of training states, with what was written.
        Returns what is damaged, the same on every rank; None if nothing is."""
        try:
            verify_share(Path(checkpoint), with_shards=False)
        except ModelError as error:
            return str(error)
        return None

    def export_model(self, model: str, adapter: str, target: str, dtype: str, max_shard_size: str) -> None:
        """Loads a model folder, and an adapter folder if one is named, and writes them in `dtype`; builds no engine."""
        config = ModelConfig.model_validate_json(model)
        rewrite_folder(
            Path(config.path),
            Path(target),
            load_tokenizer(config),
            getattr(torch, dtype),
            max_shard_size=max_shard_size,
            device=self._device,
            adapter=Path(adapter) if adapter else None,
        )

    def close(self) -> None:
        """Drops every engine, so that another recipe can build its own."""
        if self._rollout_engine is not None:
            self._rollout_engine.close()
        self._engines, self._rollout_engine, self._syncs_adapter_only, self._synced_version = {}, None, False, None
        self._memory = None

    def _keep_step(
        self,
        folder: Path,
        step: SkippedStep,
        batches: list[TokenBatch],
        losses: list[float],
        teacher_outputs: list[TeacherOutputs] | None,
    ) -> None:
        """Collective. Looks for the module where a skipped step went wrong, and writes the bundle that replays the
        step. If that cannot be written, the run continues. An error of the pass itself ends the run, as one in training
        does: FSDP would add gradients that it kept from the aborted pass to those of the next step."""
        self._num_bundles += 1
        hosted = self._engines[step.role]
        batches = hosted.read(batches, whole=True)  # a bundle is replayed on one process
        found = hosted.engine.diagnose(
            batches, hosted.loss.function, step.denominators, **hosted.options, teacher_outputs=teacher_outputs
        )
        try:
            path, step = write_bundle(folder, hosted.engine, step, batches, losses=losses, faults=found.faults)
            said = f"{step.summary}; it is kept, and `shardwise replay {path}` runs it again"
        except ExportError as error:
            said = f"the gradient norm was {step.grad_norm}; it could not be kept: {error}"
        if dist.get_rank() == 0:
            warn(f"optimizer step {step.number} of {step.role} was skipped: {said}")

    def _checkpoint_writer(self) -> CheckpointWriter:
        assert self._writer is not None, "nothing on this rank writes in the background"
        return self._writer

    def _joined_medium(self) -> Medium | None:
        """Returns the medium, which is joined at the first sync, when all its ends take part."""
        if self._medium is None and self._join_medium is not None:
            self._medium = self._join_medium()
        return self._medium

    def _sender(self, hosted: HostedEngine) -> WeightSender:
        if self._syncs_adapter_only:
            return AdapterSender(hosted.engine)
        if isinstance(self._rollout_engine, VllmEngine) and self._rollout_engine.is_part:
            return NeededSender(hosted.engine, self._rollout_engine.needed_regions())
        return hosted.engine

    def _teacher_outputs(self, batches: list[TokenBatch], role: str, teacher: str) -> list[TeacherOutputs]:
        divergence = self._engines[role].loss.divergence
        assert divergence is not None, f"{role} has no loss that learns from a teacher"
        return self._take_device(teacher, "params").engine.teacher_outputs(batches, divergence)

    def _bring_weights(self, version: int) -> SyncReceipt:
        assert self._rollout_engine is not None
        hosted = self._take_device(POLICY, "params")
        self._rollout_engine.wake("weights")
        dtype = getattr(torch, hosted.config.param_dtype)
        receipt = sync_local(self._sender(hosted), self._rollout_engine, version=version, dtype=dtype)
        self._synced_version = version
        return receipt

    def _awake_rollout(self) -> RolloutEngine:
        """Returns the rollout engine, after giving it the device. If sleeping has dropped the weights of the last sync,
        they are synced again, on all ranks alike."""
        assert self._rollout_engine is not None
        if self._rollout_engine.lacks_weights and self._synced_version is not None:
            self._bring_weights(self._synced_version)
        self._clear_device()
        self._rollout_engine.wake("weights", "kv_cache")
        return self._rollout_engine

    def _take_device(self, role: str, *parts: Part) -> HostedEngine:
        """Makes room for an engine that works with these parts of it, and brings them to the device."""
        self._clear_device(role, *parts)
        if self._rollout_engine is not None:
            self._rollout_engine.sleep()
        hosted = self._engines[role]
        hosted.engine.onload(*parts)
        return hosted

    def _clear_device(self, working: str = "", *parts: Part) -> None:
        """Offloads everything but these parts of the working engine. Also releases cached memory if the rollout engine
        has its own allocator, though not before training, which would allocate it again at once."""
        for role, hosted in self._engines.items():
            leaving = [part for part in hosted.parts_to_offload if role != working or part not in parts]
            if leaving:
                hosted.engine.offload(*leaving)
        if "optimizer" not in parts and not isinstance(self._rollout_engine, EmbeddedEngine | None):
            release_cached_blocks()


@contextmanager
def _naming(role: str) -> Iterator[None]:
    """Inside, errors name this role's engine if it may have its options from `engine` without being of that section."""
    try:
        yield
    except UserError as error:
        if role not in OF_MAIN_SECTION:
            error.args = (f"the {role}, which has the options of `engine` unless it is given its own: {error}",)
        raise
