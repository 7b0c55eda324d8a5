"""One model, sharded with fully_shard, and its optimizer. Knows nothing of algorithms, rollouts or controllers."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any, Self

import torch
import torch.distributed as dist
from torch import Tensor

from shardwise.config import ConfigError, EngineConfig, FrozenEngineConfig, OptimizerConfig
from shardwise.engine.export import export_folder
from shardwise.engine.heads import HeadName
from shardwise.engine.mesh import ParallelDims
from shardwise.engine.model import ShardedModel, build_sharded
from shardwise.engine.offload import HostCopies, Part
from shardwise.engine.optimizer import ShardedOptimizer
from shardwise.engine.runtime_state import has_adapters
from shardwise.engine.token_slice import TokenSlice
from shardwise.engine.weights import full_weights, num_parameters, num_trained_parameters
from shardwise.types import Denominators, Metrics, MetricValue, TokenBatch, TokenOutputs, merge_metrics

LossFn = Callable[[TokenOutputs, TokenBatch, Denominators], tuple[Tensor, Metrics]]
"""Maps one micro-batch to its share of the step's loss (already divided by the global denominators)."""


class TrainEngine:
    """A sharded transformers model. Without an optimizer it is a frozen engine (a reference or a reward model).

    Every method is collective: all ranks of the mesh call it with the same number of micro-batches. Ranks that share
    sequences (engine.ulysses_size) are given the same batches and return the same results.
    """

    def __init__(
        self,
        sharded: ShardedModel,
        optimizer: ShardedOptimizer | None,
        *,
        config: EngineConfig | FrozenEngineConfig,
        device: torch.device,
    ) -> None:
        self._model = sharded.model
        self._model.eval()  # no pass over the same tokens may differ from another: dropout, router noise
        self._units = sharded.units
        self._root = sharded.units[-1]
        self._backend = sharded.backend
        self._optimizer = optimizer
        self._device = device
        self._export_dtype: torch.dtype = getattr(torch, config.param_dtype)
        self._has_frozen = any(not parameter.requires_grad for parameter in self._model.parameters())
        self._reduces_each = not isinstance(config, EngineConfig) or config.reduce_gradients == "each_micro_batch"
        self._on_host: dict[Part, HostCopies] = {
            "params": HostCopies(),
            "grads": HostCopies(),
            "optimizer": HostCopies(),
        }
        self.num_bytes_read = sharded.num_bytes_read
        """Bytes of weights that this rank read from disk."""
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
    ) -> Self:
        """Builds the engine from a model folder on an initialized process group.

        Args:
            optimizer: belongs to the strategy fsdp2_train (EngineConfig) and only to it.
            total_steps: optimizer steps of the whole run, for the learning-rate schedule.
            head: what the model says about its tokens. A value head that the folder lacks starts at random.
            pad_token_id: the tokenizer's, for sequence_scores; None keeps the one that config.json names.
            seed: of new adapters, and of the rounding of bfloat16 masters.
        Raises:
            ConfigError: an option does not fit the world size or the model. ModelError: the folder cannot be loaded.
        """
        if (config.strategy == "fsdp2_train") != (optimizer is not None):
            raise ConfigError(
                f"strategy={config.strategy} {'needs an' if optimizer is None else 'takes no'} optimizer; trained "
                "engines are fsdp2_train, frozen ones fsdp2_infer"
            )
        dims = ParallelDims.from_sizes(
            world_size=dist.get_world_size(), fsdp_size=config.fsdp_size, ulysses_size=config.ulysses_size
        )
        sharded = build_sharded(
            folder,
            config,
            dims.build(device.type),
            device=device,
            head_name=head,
            pad_token_id=pad_token_id,
            seed=seed,
        )
        sharded_optimizer = None
        if optimizer is not None:
            sharded_optimizer = ShardedOptimizer(
                sharded.model.hf_model,
                optimizer,
                total_steps=total_steps,
                loss_scaling=config.param_dtype == "float16",
                seed=seed,
            )
        engine = cls(sharded, sharded_optimizer, config=config, device=device)
        engine._probe(config)
        return engine

    @torch.no_grad()
    def forward(
        self,
        batches: Sequence[TokenBatch],
        *,
        temperature: float = 1.0,
        with_entropy: bool = False,
        with_adapters: bool = True,
    ) -> list[TokenOutputs]:
        """What the head says about every micro-batch, on the host.

        Args:
            with_entropy: False leaves it out and saves a pass over the logits.
            with_adapters: False is the model as it was before its adapters: the reference policy.
        """
        with nullcontext() if with_adapters else self._adapters_off():
            outputs = [self._run(batch, temperature, with_entropy).to(torch.device("cpu")) for batch in batches]
        for unit in self._units:
            unit.reshard()  # those that stay gathered for a backward pass, which does not follow
        return outputs

    def forward_backward(
        self,
        batches: Sequence[TokenBatch],
        loss_fn: LossFn,
        denominators: Denominators,
        *,
        temperature: float = 1.0,
        with_entropy: bool = False,
    ) -> Metrics:
        """Accumulates the gradient of one optimizer step, reduced over ranks as engine.reduce_gradients says.

        A batch without samples still runs forward and backward: every rank must enter every collective.

        Returns:
            The metrics of `loss_fn` merged over the micro-batches of this rank, and its share of train/loss.
        """
        assert self._optimizer is not None, "a frozen engine has no gradients"
        with self._adapter_dropout():
            return self._accumulate(batches, loss_fn, denominators, temperature, with_entropy)

    def _accumulate(
        self,
        batches: Sequence[TokenBatch],
        loss_fn: LossFn,
        denominators: Denominators,
        temperature: float,
        with_entropy: bool,
    ) -> Metrics:
        assert self._optimizer is not None
        parts: list[Metrics] = []
        for index, batch in enumerate(batches):
            self._set_reduction(is_last=index == len(batches) - 1)
            outputs = self._run(batch, temperature, with_entropy)
            loss, metrics = loss_fn(outputs, batch.to(self._device), denominators)
            (loss * self._optimizer.loss_scale).backward()
            parts.append({**metrics, "train/loss": MetricValue.sum(loss.detach())})
        return {name: value.host() for name, value in merge_metrics(parts).items()}

    def optim_step(self) -> Metrics:
        """Clips, steps, clears the gradients; skips the update where a gradient is not finite."""
        assert self._optimizer is not None, "a frozen engine has no optimizer"
        return self._optimizer.step()

    def named_weights(self, dtype: torch.dtype) -> Iterator[tuple[str, Tensor]]:
        """Yields (Hugging Face name, full tensor) on every rank, one tensor at a time, in the same order everywhere;
        adapters are merged."""
        return full_weights(self._model.hf_model, dtype)

    def adapter_weights(self, dtype: torch.dtype) -> Iterator[tuple[str, Tensor]]:
        """As `named_weights`, of everything that an adapter file holds, under peft's names."""
        from shardwise.engine.adapters import adapter_weights

        return adapter_weights(self._model.hf_model, dtype)

    def export_adapter(self, path: Path, base_model: str) -> None:
        """Writes a folder that `PeftModel.from_pretrained` loads; `base_model` is the folder or name it belongs to."""
        from shardwise.engine.adapters import export_adapter

        export_adapter(self._model.hf_model, path, base_model)

    def export_hf(self, path: Path, tokenizer: Any) -> None:
        """Writes a folder that `from_pretrained` loads, in the compute dtype, adapters merged."""
        export_folder(self._model.hf_model, tokenizer, path, self._export_dtype)

    def offload(self, *parts: Part) -> None:
        """Moves parts to host memory and frees their memory on the device, until `onload`. What is there stays there.

        The engine must not compute with a part that is away.
        """
        for part in parts:
            self._on_host[part].take(self._tensors(part))

    def onload(self, *parts: Part) -> None:
        """Brings parts back to the device they came from. What is there already stays."""
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
        """Reduced each time, gradients are scattered over the shards after every micro-batch; replicas of them are
        summed once, after the last."""
        # FSDP gathers a unit without a backward pass for it all the same, and drops that only after a last backward;
        # the next forward would take it for its own, gathered from other shards if reshard_after_forward is a number.
        self._root.set_is_last_backward(is_last or self._has_frozen)
        self._root.set_requires_gradient_sync(self._reduces_each or is_last)
        self._root.set_requires_all_reduce(is_last)

    def _probe(self, config: EngineConfig | FrozenEngineConfig) -> None:
        """Two tokens through the whole model: what an option cannot compute shows here, before anything is trained."""
        batch = TokenBatch(
            input_ids=torch.zeros(2, dtype=torch.int64),
            position_ids=torch.arange(2),
            cu_seqlens=torch.tensor([0, 2], dtype=torch.int32),
            loss_mask=torch.tensor([False, True]),
            sample_index=[],
        )
        try:
            self.forward([batch])
        except RuntimeError as error:
            if not config.module_precision:
                raise
            reason = str(error).strip().splitlines()[0]
            raise ConfigError(
                f"engine.module_precision does not fit the model: {reason}. Modules that do not cast their inputs "
                "themselves need cast_forward_inputs=true"
            ) from None

    def _adapter_dropout(self) -> AbstractContextManager[None]:
        if not has_adapters(self._model.hf_model):
            return nullcontext()
        from shardwise.engine.lora import adapter_dropout

        return adapter_dropout(self._model.hf_model)

    def _adapters_off(self) -> AbstractContextManager[None]:
        from shardwise.engine.lora import adapters_off  # importing peft takes seconds

        return adapters_off(self._model.hf_model)

    def _run(self, batch: TokenBatch, temperature: float, with_entropy: bool) -> TokenOutputs:
        ulysses, head = self._backend.ulysses, self._model.head
        tokens = TokenSlice.of(batch, head.scored, ulysses=ulysses, device=self._device, pad_token_id=head.pad_token_id)
        results = self._model(tokens, self._backend, temperature=temperature, with_entropy=with_entropy)
        whole = [tokens.assemble(result, ulysses) for result in results]
        return head.outputs(*whole)
