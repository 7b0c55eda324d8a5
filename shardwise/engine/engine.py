"""One model, sharded with fully_shard, and its optimizer. Knows nothing of algorithms, rollouts or controllers."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from itertools import islice, repeat
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Self

import torch
import torch.distributed as dist
from torch import Tensor

from shardwise.config import (
    ConfigError,
    EngineConfig,
    FrozenEngineConfig,
    ModelError,
    OptimizerConfig,
    TrainingError,
)
from shardwise.engine.agreement import raised_on_every_rank
from shardwise.engine.busy import BusyClock
from shardwise.engine.files.engine_state import EngineState
from shardwise.engine.files.export import ExportPlan, StagedExport, export_folder
from shardwise.engine.files.initial_weights import InitialWeights
from shardwise.engine.files.staging import Copies, StagingBuffers
from shardwise.engine.gathering import gathered
from shardwise.engine.heads import HeadName, LogprobHead, Wanted
from shardwise.engine.mesh import ParallelDims
from shardwise.engine.model import ShardedModel, build_sharded
from shardwise.engine.needed_regions import NeededRegions
from shardwise.engine.nonfinite import LOSS, Diagnosis, watched
from shardwise.engine.optim.optimizer import MASTER, ShardedOptimizer, global_grad_norm
from shardwise.engine.runtime_state import buffer_names, has_adapters
from shardwise.engine.shards import first_numbers, local_shard
from shardwise.engine.teacher_outputs import Divergence, TeacherOutputs
from shardwise.engine.token_slice import TokenSlice, require_embeddable
from shardwise.engine.vision import divide_images
from shardwise.engine.weights import num_parameters, num_trained_parameters, stream_weights
from shardwise.families import ROW_BYTES, UnreadableRouter, unaligned_expert, with_release
from shardwise.fault_plan import fault_point
from shardwise.model_config import end_of_sequence_ids
from shardwise.ops import HostCopies, ModuleTrace, nonfinite_names, plain_name, traced
from shardwise.region import Region
from shardwise.types import Denominators, ImageRef, Metrics, MetricValue, TokenBatch, TokenOutputs, merge_metrics

if TYPE_CHECKING:
    from shardwise.engine.files.adapters import StagedAdapter

LossFn = Callable[[TokenOutputs, TokenBatch, Denominators], tuple[Tensor, Metrics]]
"""Maps one micro-batch to its share of the step's loss (already divided by the global denominators)."""


Part = Literal["params", "grads", "optimizer"]
"""What can be offloaded from the device by itself."""
Origin = tuple[int, int]
"""The rank that a micro-batch belongs to, and its place among those of this rank in an optimizer step."""


class TrainEngine:
    """A sharded transformers model. Without an optimizer it is a frozen engine (a reference or a reward model).

    Collective are `build`, `load_initial_weights`, `forward`, `teacher_outputs`, `forward_backward`, `optim_step`,
    `diagnose`, `named_weights`, `needed_weights`, `adapter_weights`, `export_adapter`, `export_hf`, `stage_export` and
    `stage_adapter`: all ranks of the mesh call them with the same number of micro-batches. Local, waiting for no other
    rank, are `own_images`, `trace`, `check_teacher`, `skip_step`, `end_completions_at`, `nonfinite_tensors`, `offload`
    and `onload`.

    Ranks that share sequences (engine.ulysses_size) are given the same batches, with all their images or each with its
    `own_images`, and return the same results.
    """

    def __init__(
        self,
        sharded: ShardedModel,
        optimizer: ShardedOptimizer | None,
        *,
        config: EngineConfig | FrozenEngineConfig,
        device: torch.device,
        seed: int,
        initial: InitialWeights | None = None,
    ) -> None:
        """
        Args:
            initial: what the trained weights are read from if no `state` is loaded into them; None: they are loaded
                already.
        """
        self._model = sharded.model
        self._model.eval()  # no pass over the same tokens may differ from another: dropout, router noise
        self._units = sharded.units
        self._root = sharded.units[-1]
        self._backend = sharded.backend
        self._expert_loads = sharded.expert_loads
        self._replay = sharded.replay
        self._optimizer = optimizer
        self._device = device
        self._seed = seed
        self._busy = BusyClock(device)
        self._busy.watch(sharded.units)
        self._losses: list[Tensor] = []  # losses of the micro-batches since the last step
        self._is_accumulating = False
        self._compute_dtype: torch.dtype = getattr(torch, config.param_dtype)
        self._has_frozen = any(not parameter.requires_grad for parameter in self._model.parameters())
        self._reduces_each = not isinstance(config, EngineConfig) or config.reduce_gradients == "each_micro_batch"
        self._on_host: dict[Part, HostCopies] = {
            "params": HostCopies(),
            "grads": HostCopies(),
            "optimizer": HostCopies(),
        }
        self._copies = Copies()
        self._export_buffers = StagingBuffers(self._copies)
        self._export_plan: ExportPlan | None = None
        self._state = None if optimizer is None else EngineState(sharded.model, optimizer, self._copies, initial)
        self._needed = NeededRegions()
        self.num_bytes_read = 0
        """Bytes of weights that this rank read from the model folder."""
        self.num_parameters = num_parameters(self._model)
        self.num_trained_parameters = num_trained_parameters(self._model)

    @classmethod
    def build(
        cls,
        folder: Path,
        config: EngineConfig | FrozenEngineConfig,
        *,
        device: torch.device,
        optimizer: OptimizerConfig | None = None,
        total_steps: int = 1,
        head: HeadName = "logprobs",
        pad_token_id: int | None = None,
        seed: int = 0,
        require_finite: bool = True,
        with_trained: bool = True,
    ) -> Self:
        """Builds the engine from a model folder on an initialized process group.

        Args:
            optimizer: belongs to the strategy fsdp2_train (EngineConfig) and only to it.
            total_steps: optimizer steps of the whole run, for the learning-rate schedule.
            head: what the model says about its tokens. A value head that the folder lacks starts at random.
            pad_token_id: the tokenizer's, for sequence_scores; None keeps the one that config.json names.
            seed: seeds new adapters, their dropout, and the rounding of bfloat16 masters.
            require_finite: False also loads weights that hold NaN or infinities, to look at what they do.
            with_trained: False reads only frozen weights; the trained ones have to come from `load_initial_weights` or
                `state` before anything is computed.
        Raises:
            ConfigError: on every rank: an option does not fit the world size or the model. ModelError: on every rank:
                the folder cannot be loaded.
        """
        if (config.strategy == "fsdp2_train") != (optimizer is not None):
            raise ConfigError(
                f"strategy={config.strategy} {'needs an' if optimizer is None else 'takes no'} optimizer; trained "
                "engines are fsdp2_train, frozen ones fsdp2_infer"
            )
        dims = ParallelDims.of(config, world_size=dist.get_world_size())
        sharded, initial = build_sharded(
            folder,
            config,
            dims.build(device.type),
            device=device,
            head_name=head,
            pad_token_id=pad_token_id,
            seed=seed,
            require_finite=require_finite,
        )
        sharded_optimizer = None
        if optimizer is not None:
            with raised_on_every_rank(ConfigError):
                sharded_optimizer = ShardedOptimizer(
                    sharded.model.hf_model,
                    optimizer,
                    total_steps=total_steps,
                    loss_scaling=isinstance(config, EngineConfig) and config.has_float16_gradients,
                    seed=seed,
                )
        left_out = None if with_trained else initial
        engine = cls(sharded, sharded_optimizer, config=config, device=device, seed=seed, initial=left_out)
        engine.num_bytes_read = initial.load() if with_trained else initial.load_untrained()
        engine._probe(config)
        return engine

    def load_initial_weights(self) -> None:
        """Reads the trained weights that `build` left out. Raises ModelError as `build`."""
        self.num_bytes_read += self.state.load_initial_weights()

    @torch.no_grad()
    def forward(
        self,
        batches: Iterable[TokenBatch],
        *,
        temperature: float = 1.0,
        with_logprobs: bool = True,
        with_entropy: bool = False,
        with_adapters: bool = True,
        teacher_outputs: Sequence[TeacherOutputs] | None = None,
    ) -> list[TokenOutputs]:
        """Returns what the head says about every micro-batch, on the host.

        Args:
            batches: as many on every rank. One is asked for when the one before it has been given to the device, and
                is not kept any longer, so its images may be read then.
            temperature: above 0; logits are divided by it.
            with_logprobs, with_entropy: False leaves them out and saves passes over the logits.
            with_adapters: False is the model as it was before its adapters: the reference policy.
            teacher_outputs: a teacher's, one for each micro-batch; the divergence from it is among the outputs.
        Raises:
            ValueError: the temperature is not above 0. DataError: a token that the model has no embedding for.
        """
        self._require_weights()
        wanted = _wanted(temperature, with_logprobs, with_entropy, teacher_outputs)
        pairs = zip(batches, wanted, strict=teacher_outputs is not None)
        with nullcontext() if with_adapters else self._adapters_off():
            outputs = [self._forward(batch, about) for batch, about in pairs]
        self._reshard()
        return [output.to(torch.device("cpu")) for output in outputs]  # not between them: the device would wait

    def own_images(self, image_refs: Sequence[ImageRef]) -> range:
        """Which images of a micro-batch this rank processes: ranks that share sequences divide them."""
        rank = 0 if self._backend.ulysses is None else self._backend.ulysses.rank
        return divide_images([image_ref.num_patches for image_ref in image_refs], self._ulysses_size())[rank]

    def trace(self) -> AbstractContextManager[ModuleTrace]:
        """Inside this context, keeps what this rank's modules compute, by the names that they have in transformers."""
        model = self._model.hf_model
        return traced((plain_name(path), module) for path, module in model.named_modules())

    @torch.no_grad()
    def teacher_outputs(self, batches: Iterable[TokenBatch], divergence: Divergence) -> list[TeacherOutputs]:
        """Returns, for distillation, this teacher's hidden states and output projection for every micro-batch, not its
        logits.

        A step's states wait on the host: scored tokens x hidden size. The output projection is gathered once, and is
        whole on every rank's device until the last of these is dropped: vocabulary x hidden size x bytes of param_dtype
        (1.2 GB for 151,936 x 4,096 in bfloat16). What else this engine has on the device may be offloaded meanwhile.
        """
        head = self._model.head
        assert isinstance(head, LogprobHead), "a value head has no distribution to learn from"
        wanted = Wanted(logprobs=False, states=True)
        states = [self._model(self._slice(batch), self._backend, wanted)["states"].cpu() for batch in batches]
        self._reshard()
        projection = gathered(head.projection.weight, self._compute_dtype)
        return [
            TeacherOutputs(states=own, projection=projection, transform=head.transform, divergence=divergence)
            for own in states
        ]

    def check_teacher(self, teacher: Self) -> None:
        """Checks once, after both are built, that this model can learn from the outputs of `teacher`.

        Raises:
            ModelError: one of them is not a language model, or their vocabularies differ in size.
            ConfigError: they do not share sequences between the same ranks.
        """
        student_head, teacher_head = self._model.head, teacher._model.head
        if not (isinstance(student_head, LogprobHead) and isinstance(teacher_head, LogprobHead)):
            raise ModelError("a student and its teacher are both language models; a critic or reward model is neither")
        vocab, teacher_vocab = len(student_head.projection.weight), len(teacher_head.projection.weight)
        if vocab != teacher_vocab:
            smaller = min(vocab, teacher_vocab)
            raise ModelError(
                f"the teacher's output projection has {teacher_vocab} words, the student's {vocab}; a divergence needs "
                f"the same words in both. If their tokenizers are the same and what follows the first {smaller} words "
                f"is padding, model.resize_token_embeddings({smaller}) and model.save_pretrained(folder) of "
                "transformers write a copy of the larger one without it"
            )
        size, teacher_size = self._ulysses_size(), teacher._ulysses_size()
        if size != teacher_size:
            raise ConfigError(
                f"the teacher's ulysses_size={teacher_size} is not the student's {size}; a rank teaches the tokens "
                f"that it computes of the student, so set the teacher's to {size}"
            )

    def forward_backward(
        self,
        batches: Sequence[TokenBatch],
        loss_fn: LossFn,
        denominators: Denominators,
        *,
        temperature: float = 1.0,
        with_logprobs: bool = True,
        with_entropy: bool = False,
        teacher_outputs: Sequence[TeacherOutputs] | None = None,
        origins: Sequence[Origin] | None = None,
    ) -> Metrics:
        """Accumulates the gradient of one optimizer step, reduced over ranks as engine.reduce_gradients says.

        A batch without samples still runs forward and backward: every rank must enter every collective.

        Args:
            temperature, with_logprobs, with_entropy, teacher_outputs: as for `forward`; the divergence has a gradient.
            origins: the origin of each micro-batch, which seeds the adapters' dropout; None: this rank's own, in order.
        Returns:
            The metrics of `loss_fn` merged over the micro-batches of this rank, and its share of train/loss, on the
            device: nothing waits for it before `optim_step` does.
        Raises:
            TrainingError: an earlier call ended with an error; the gradients that it left in FSDP would be added to
                these. Weights or gradients are offloaded. ValueError: there are more or fewer teacher_outputs, or the
                temperature is not above 0.
        """
        assert self._optimizer is not None, "a frozen engine has no gradients"
        self._require_weights()
        if self._is_accumulating:
            raise TrainingError(
                "an earlier forward_backward of this engine ended with an error, and what it left of gradients would "
                "be added to others; build the engine again, from its last checkpoint"
            )
        self._require_onloaded("grads")
        if teacher_outputs is not None and len(teacher_outputs) != len(batches):
            raise ValueError(f"{len(batches)} micro-batches, and teacher_outputs of {len(teacher_outputs)}")
        wanted = list(islice(_wanted(temperature, with_logprobs, with_entropy, teacher_outputs), len(batches)))
        if origins is None:
            origins = [(dist.get_rank(), index) for index in range(len(batches))]
        return self._accumulate(batches, wanted, origins, loss_fn, denominators)

    def _accumulate(
        self,
        batches: Sequence[TokenBatch],
        wanted: Sequence[Wanted],
        origins: Sequence[Origin],
        loss_fn: LossFn,
        denominators: Denominators,
    ) -> Metrics:
        assert self._optimizer is not None
        self._is_accumulating = True
        parts: list[Metrics] = []
        for index, (batch, about, origin) in enumerate(zip(batches, wanted, origins, strict=True)):
            self._set_reduction(is_last=index == len(batches) - 1)
            tokens, scale = self._slice(batch), self._optimizer.loss_scale
            whole = batch.to(self._device)
            watching = self._expert_loads.watching(
                batch, tokens, num_sequences=denominators.num_sequences, loss_scale=scale
            )
            replaying = self._replay.replaying(tokens.experts, counts=True)
            with watching, replaying, self._adapter_dropout(origin):
                with self._busy.phase("forward"):
                    fault_point("forward", first_numbers(self._optimizer.parameters))
                    outputs = self._run(tokens, about)
                    self._expert_loads.settle()
                    self._replay.settle()
                    loss, metrics = loss_fn(outputs, whole, denominators)
                with self._busy.phase("backward"):
                    fault_point("backward", loss.data.view(-1))
                    (loss * scale).backward()
            self._losses.append(loss.detach())
            parts.append({**metrics, "train/loss": MetricValue.sum(loss.detach())})
        self._is_accumulating = False
        return merge_metrics(parts)

    def optim_step(self, *, on_fault: Callable[[float, list[float]], None] | None = None) -> Metrics:
        """Clips, steps, clears the gradients; skips the update where a gradient or a loss is not finite.

        Args:
            on_fault: as for `ShardedOptimizer.step`; also given the losses of this rank's micro-batches.
        Returns:
            The optimizer's metrics, how long this rank computed since the last step (see `BusyClock`), and on rank 0
            the load of experts (see `ExpertLoads`).
        """
        assert self._optimizer is not None, "a frozen engine has no optimizer"
        self._require_onloaded("params", "grads", "optimizer")
        losses, self._losses = self._losses, []
        routed = self._expert_loads.take() | self._replay.take()  # taken before on_fault may run another pass
        self._copies.wait()
        if on_fault is None:
            metrics = self._optimizer.step(losses)
        else:
            metrics = self._optimizer.step(
                losses, on_fault=lambda norm: on_fault(norm, [float(loss) for loss in losses])
            )
        return metrics | routed | self._busy.take()  # the norm has waited for the device already

    def skip_step(self) -> Metrics:
        """Counts a step that has nothing to train on, for the schedule. Weights and optimizer states stay as they are:
        an update would move them by momentum and weight decay, even without a gradient."""
        assert self._optimizer is not None, "a frozen engine has no optimizer"
        return self._optimizer.skip_step()

    def diagnose(
        self, batches: Sequence[TokenBatch], loss_fn: LossFn, denominators: Denominators, **options: Any
    ) -> Diagnosis:
        """Runs a `forward_backward`, options included, and tells where numbers stop being finite. Leaves no
        gradients."""
        assert self._optimizer is not None, "a frozen engine has no gradients"

        def watched_loss_fn(
            outputs: TokenOutputs, batch: TokenBatch, denominators: Denominators
        ) -> tuple[Tensor, Metrics]:
            loss, metrics = loss_fn(outputs, batch, denominators)
            watch.check(loss.detach(), phase="loss", module=LOSS)
            return loss, metrics

        try:
            with watched(self._model) as watch:
                self.forward_backward(batches, watched_loss_fn, denominators, **options)
            return Diagnosis(
                losses=[float(loss) for loss in self._losses],
                grad_norm=global_grad_norm(self._optimizer.parameters, self._losses) / self._optimizer.loss_scale,
                faults=watch.faults,
            )
        finally:
            self._losses = []
            self._expert_loads.clear()
            self._replay.clear()
            self._optimizer.zero_grad()

    @property
    def state(self) -> EngineState:
        """The training state, to save and to load: the masters, optimizer states and counts that a resumed run
        continues from."""
        assert self._state is not None, "a frozen engine has no training state"
        return self._state

    def end_completions_at(self, token_id: int) -> None:
        """Adds a token to those that end completions in the generation config of exports."""
        model = self._model.hf_model
        ends = end_of_sequence_ids(model.generation_config, model.config.get_text_config())
        model.generation_config.eos_token_id = [*ends, token_id]

    @property
    def buffer_names(self) -> set[str]:
        """Names of tensors that are no parameters: some of `named_weights`, and those that no checkpoint holds."""
        return buffer_names(self._model.hf_model)

    def named_weights(self, dtype: torch.dtype) -> Iterator[tuple[str, Tensor]]:
        """Yields (Hugging Face name, full tensor) on every rank, one tensor at a time, in the same order everywhere;
        adapters are merged."""
        self._require_weights()
        return stream_weights(self._model.hf_model, dtype)

    def needed_weights(self, dtype: torch.dtype, needed: Mapping[str, Region]) -> Iterator[tuple[str, Tensor]]:
        """Like `named_weights`, but yields of each tensor that `needed` names what this rank needs of it, and nothing
        else is sent to the rank."""
        self._require_weights()
        return stream_weights(self._model.hf_model, dtype, self._needed.by_rank(needed))

    def adapter_weights(self, dtype: torch.dtype) -> Iterator[tuple[str, Tensor]]:
        """Like `named_weights`, for everything that an adapter file holds, under peft's names."""
        from shardwise.engine.files.adapters import adapter_weights

        self._require_weights()
        return adapter_weights(self._model.hf_model, dtype)

    def export_adapter(self, path: Path, base_model: str) -> None:
        """Writes a folder that `PeftModel.from_pretrained` loads; `base_model` is the folder or name it belongs to."""
        from shardwise.engine.files.adapters import export_adapter

        self._require_weights()
        export_adapter(self._model.hf_model, path, base_model)

    def export_hf(self, path: Path, tokenizer: Any, dtype: torch.dtype | None = None) -> None:
        """Writes a folder that `from_pretrained` loads, adapters merged. `dtype`: None is the compute dtype."""
        self._require_weights()
        export_folder(self._model.hf_model, tokenizer, path, dtype or self._compute_dtype)

    @torch.no_grad()
    def nonfinite_tensors(self) -> list[str]:
        """Names of the weights and of the optimizer states (`exp_avg/NAME`) whose part on this rank holds NaN or an
        infinity."""
        tensors = {plain_name(name): weight for name, weight in self._model.hf_model.named_parameters()}
        if self._optimizer is not None:
            states = self._optimizer.named_tensors().items()
            tensors |= {name: state for name, state in states if not name.startswith(MASTER)}
        return nonfinite_names((name, local_shard(tensor)) for name, tensor in tensors.items())

    def stage_export(self) -> StagedExport:
        """Copies what `export_hf` would write to host memory, so that it can be written while training goes on.
        Whatever changes weights waits until the copies are made. The next call overwrites them."""
        self._require_weights()
        if self._export_plan is None:
            self._export_plan = ExportPlan.of(self._model.hf_model, self._compute_dtype)
        return StagedExport.of(self._export_plan, self._export_buffers)

    def stage_adapter(self, base_model: str) -> "StagedAdapter":
        """Copies what `export_adapter` would write to the host memory of rank 0."""
        from shardwise.engine.files.adapters import StagedAdapter

        self._require_weights()
        return StagedAdapter.of(self._model.hf_model, base_model)

    def offload(self, *parts: Part) -> None:
        """Moves parts to host memory and frees their memory on the device, until `onload`. Parts that are there already
        stay there.

        The engine computes with no part that is offloaded: it raises TrainingError.
        """
        self._copies.wait()
        for part in parts:
            self._on_host[part].take(self._tensors(part))

    def onload(self, *parts: Part) -> None:
        """Brings parts back to the device they came from. Parts that are there already stay."""
        for part in parts:
            self._on_host[part].give_back()

    def _tensors(self, part: Part) -> list[Tensor]:
        match part:
            case "params":
                return list(self._model.parameters())
            case "grads":
                return [p.grad for p in self._model.parameters() if p.grad is not None]
            case "optimizer":
                return [] if self._optimizer is None else list(self._optimizer.state_tensors())

    def _set_reduction(self, *, is_last: bool) -> None:
        """Tells FSDP what to reduce after a micro-batch. Gradients are scattered over the shards after every one, or
        only after the last, as engine.reduce_gradients says; replicas are summed once, after the last."""
        # FSDP gathers frozen units for backward too, though none runs, and frees that buffer only after the last
        # backward. The next forward would use it, gathered from other shards if reshard_after_forward is a number.
        self._root.set_is_last_backward(is_last or self._has_frozen)
        self._root.set_requires_gradient_sync(self._reduces_each or is_last)
        self._root.set_requires_all_reduce(is_last)

    def _require_weights(self) -> None:
        if self._state is not None:
            self._state.require_weights()
        self._require_onloaded("params")

    def _require_onloaded(self, *parts: Part) -> None:
        """Raises TrainingError: a part that is worked with is in host memory."""
        if away := [part for part in parts if self._on_host[part]]:
            raise TrainingError(
                f"{', '.join(away)} of this engine are offloaded, and this needs them; call onload first"
            )

    @torch.no_grad()
    def _probe(self, config: EngineConfig | FrozenEngineConfig) -> None:
        """Runs two tokens through the model, whatever its weights are, so that an option it cannot compute with fails
        here, before training."""
        batch = TokenBatch(
            input_ids=torch.zeros(2, dtype=torch.int64),
            position_ids=torch.arange(2),
            cu_seqlens=torch.tensor([0, 2], dtype=torch.int32),
            loss_mask=torch.tensor([False, True]),
            sample_index=[],
        )
        try:
            with self._expert_loads.probing():
                outputs = self._forward(batch, Wanted())
            self._reshard()
            outputs.to(torch.device("cpu"))  # waiting for the device shows what it cannot compute
        except UnreadableRouter as error:
            remedy = "router_metrics=summary with router_aux_loss_coef=0 counts nothing where none can be"
            raise ModelError(with_release(f"{error}; {remedy}")) from None
        except (torch.OutOfMemoryError, dist.DistError):
            raise
        except RuntimeError as error:
            reason = str(error).strip().partition("\n")[0]
            if name := unaligned_expert(self._model.hf_model, getattr(torch, config.param_dtype)):
                raise ConfigError(
                    f"engine.param_dtype={config.param_dtype}: grouped_mm cannot compute {name} ({reason}); it needs "
                    f"rows of a multiple of {ROW_BYTES} bytes. Set engine.experts_implementation to eager or "
                    "batched_mm, or leave it out"
                ) from None
            if not config.module_precision:
                raise
            raise ConfigError(
                f"engine.module_precision does not fit the model: {reason}. Modules that do not cast their inputs "
                "themselves need cast_forward_inputs=true"
            ) from None

    def _adapter_dropout(self, origin: Origin) -> AbstractContextManager[None]:
        if not has_adapters(self._model.hf_model):
            return nullcontext()
        from shardwise.engine.lora import adapter_dropout

        assert self._optimizer is not None
        return adapter_dropout(self._model.hf_model, (self._seed, self._optimizer.num_steps, *origin))

    def _adapters_off(self) -> AbstractContextManager[None]:
        from shardwise.engine.lora import adapters_off  # importing peft takes seconds

        return adapters_off(self._model.hf_model)

    def _forward(self, batch: TokenBatch, wanted: Wanted) -> TokenOutputs:
        tokens = self._slice(batch)
        with self._replay.replaying(tokens.experts, counts=False):
            return self._run(tokens, wanted)

    def _run(self, tokens: TokenSlice, wanted: Wanted) -> TokenOutputs:
        found = self._model(tokens, self._backend, wanted)
        return TokenOutputs(**{name: tokens.assemble(own, self._backend.ulysses) for name, own in found.items()})

    def _slice(self, batch: TokenBatch) -> TokenSlice:
        """This rank's tokens of the batch. Raises DataError: a token has no embedding."""
        ulysses, head = self._backend.ulysses, self._model.head
        require_embeddable(batch.input_ids, self._model.hf_model.config.get_text_config().vocab_size)
        return TokenSlice.of(
            batch,
            head.scored,
            ulysses=ulysses,
            device=self._device,
            pad_token_id=head.pad_token_id,
            tower=self._model.tower,
        )

    def _reshard(self) -> None:
        for unit in self._units:
            unit.reshard()  # some stay gathered for a backward pass, and none follows

    def _ulysses_size(self) -> int:
        return 1 if self._backend.ulysses is None else self._backend.ulysses.size


def _wanted(
    temperature: float,
    with_logprobs: bool,
    with_entropy: bool,
    teacher_outputs: Sequence[TeacherOutputs] | None,
) -> Iterable[Wanted]:
    """What is wanted of every micro-batch: the same without end, or what a teacher's outputs say of each."""
    assert with_logprobs or not with_entropy, "entropy comes with the logprobs"
    if not temperature > 0:
        raise ValueError(f"temperature={temperature}: it has to be above 0; 1 is the model's own distribution")
    common = Wanted(temperature=temperature, logprobs=with_logprobs, entropy=with_entropy)
    return repeat(common) if teacher_outputs is None else [replace(common, teacher=one) for one in teacher_outputs]
