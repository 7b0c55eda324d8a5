"""The optimizer of a sharded model: learning rates, clipping, loss scaling, the guard against numbers that are not
finite."""

import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from itertools import compress
from operator import not_
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from shardwise.config import ConfigError, ModelError, OptimizerConfig, TrainingError
from shardwise.engine.exchange import all_gather_json
from shardwise.engine.optim.adamw import BFloat16AdamW, HostAdamW
from shardwise.engine.optim.adamw_8bit import (
    BLOCK_ELEMENTS,
    MIN_ELEMENTS,
    build_adamw_8bit,
    has_whole_blocks,
    saved_states,
)
from shardwise.engine.optim.loss_scale import LossScaler
from shardwise.engine.optim.muon import ShardedMuon
from shardwise.engine.optim.parameter_groups import (
    ParameterGroup,
    TrainedParameter,
    group_parameters,
    trained_parameters,
)
from shardwise.engine.optim.schedule import schedule_at
from shardwise.engine.shards import first_numbers, is_sharded, local_shard
from shardwise.fault_plan import fault_point
from shardwise.types import Metrics, MetricValue

_SUMMABLE_NUMBERS = 1 << 16
MASTER = "master/"
"""Prefix of the names of weights in a training state."""
BEGIN_WITHOUT_STATE = (
    "or begin without that state: trainer.resume=never, or model.path=PATH of the hf/ beside it with another "
    "trainer.output_dir"
)
"""How an error about a training state that cannot be loaded ends."""


class ShardedOptimizer:
    """Torch optimizers over the shards of a model, with everything that belongs to one step."""

    def __init__(
        self,
        model: nn.Module,
        config: OptimizerConfig,
        *,
        total_steps: int,
        loss_scaling: bool = False,
        seed: int = 0,
    ) -> None:
        """
        Args:
            model: its trained parameters are plain tensors, or DTensors that fully_shard sharded on dim 0; all float32,
                or all bfloat16 for stochastic rounding.
            total_steps: optimizer steps of the whole run, for the schedule.
            loss_scaling: the loss is multiplied by `loss_scale` before backward, for float16.
            seed: seeds the stochastic rounding of bfloat16 weights.
        Raises:
            ConfigError: nothing is trained, a key of module_learning_rates has no parameter, the optimizer does not
                support the weights' dtype, finds no matrix, or needs a package that is missing.
        """
        self._config = config
        self._total_steps = total_steps
        trained = trained_parameters(model, config.module_learning_rates)
        self.parameters = [one.parameter for one in trained]
        self._names = {id(one.parameter): one.name for one in trained}
        dtype = _common_dtype(trained, config)
        is_special = [_is_special(one, config) for one in trained]
        self._special_groups = group_parameters(list(compress(trained, is_special)), config)
        self._adamw_groups = group_parameters(list(compress(trained, map(not_, is_special))), config)
        self._special = _build_special(self._special_groups, config)
        """Muon, or AdamW in 8 bits; AdamW trains the parameters that it is not for."""
        self._adamw: torch.optim.Optimizer | None = None
        if self._adamw_groups and dtype == torch.bfloat16:
            self._adamw = BFloat16AdamW(
                _torch_groups(self._adamw_groups),
                names=self._names,
                betas=config.adam_betas,
                eps=config.adam_eps,
                fused=config.adamw_implementation == "fused",
                seed=seed,
            )
        elif self._adamw_groups:
            self._adamw = _build_adamw(self._adamw_groups, config)
        self.scaler = LossScaler() if loss_scaling else None
        """Keeps the loss scale of float16 training; None without one."""
        self.num_steps = 0
        """Steps asked for so far, skipped ones included."""
        self._num_nonfinite_in_a_row = 0

    @property
    def optimizers(self) -> list[torch.optim.Optimizer]:
        """The torch optimizers that have parameters."""
        return [optimizer for optimizer in (self._special, self._adamw) if optimizer is not None]

    @property
    def loss_scale(self) -> float:
        """What the loss of the next step is multiplied by before backward; gradients are divided by it in `step`."""
        return 1.0 if self.scaler is None else self.scaler.scale

    def step(self, losses: Sequence[Tensor] = (), *, on_fault: Callable[[float], None] | None = None) -> Metrics:
        """Collective. Clips, updates unless a gradient or a loss is not finite on any rank, and clears the gradients.

        Args:
            losses: the loss [] of each micro-batch of this rank.
            on_fault: called on every rank at the first of several skipped steps in a row, unless a smaller loss scale
                may cure it, with the norm of the gradient (NaN also if a loss was not finite). By then the gradients
                are cleared; all else is as before the step.
        Raises:
            TrainingError: `max_nonfinite_steps` steps in a row were skipped, overflows that a smaller loss scale may
                cure not counted.
        """
        share = schedule_at(self._config, self.num_steps, self._total_steps)
        self._set_learning_rates(share)
        scale = self.loss_scale
        fault_point("allreduce", first_numbers(p.grad for p in self.parameters if p.grad is not None))
        norm = global_grad_norm(self.parameters, losses) / scale
        finite = math.isfinite(norm)
        if finite:
            self._unscale_and_clip(norm, scale)
            fault_point("optim")
            for optimizer in self.optimizers:
                optimizer.step()
        self.zero_grad()
        num_bad = 0 if finite else sum(not math.isfinite(loss) for loss in losses)
        is_overflow = not finite and self._is_overflow(num_bad)
        is_fault = not finite and not is_overflow
        self._num_nonfinite_in_a_row = 0 if finite else self._num_nonfinite_in_a_row + is_fault
        if is_fault and self._num_nonfinite_in_a_row == 1 and on_fault is not None:
            on_fault(norm)
        self.num_steps += 1
        self._require_progress(norm)
        metrics = self._learning_rates(share) | {
            "train/nonfinite_fraction": MetricValue.mean(float(not finite), 1),
            "train/nonfinite_loss_fraction": MetricValue.mean(float(num_bad), len(losses)),
        }
        if finite:
            metrics["train/grad_norm"] = MetricValue.mean(norm, 1)
        if self.scaler is not None:
            metrics["train/loss_scale"] = MetricValue.max(scale)
            if not is_fault:
                self.scaler.update(finite=finite)
        return metrics

    def skip_step(self) -> Metrics:
        """Counts a step and leaves everything else as it is."""
        share = schedule_at(self._config, self.num_steps, self._total_steps)
        self.num_steps += 1
        return self._learning_rates(share)

    def zero_grad(self) -> None:
        """Drops the gradients."""
        for parameter in self.parameters:
            parameter.grad = None

    def state_tensors(self) -> Iterator[Tensor]:
        """The optimizer states that belong on the parameters' device, as plain tensors, each once.

        Setting `.data` of one moves it. DTensors and quantized tensors are given as the plain ones inside; step
        counters and the host memory of adamw_cpu are left out. Before the first update there are none.
        """
        if self._config.optimizer == "adamw_cpu":
            return
        states = (
            value for optimizer in self.optimizers for state in optimizer.state.values() for value in state.values()
        )
        tensors = (tensor for state in states if isinstance(state, Tensor) for tensor in _plain_tensors(state))
        yield from {id(tensor): tensor for tensor in tensors if tensor.dim()}.values()

    def named_tensors(self) -> dict[str, Tensor]:
        """The masters as `master/NAME` and every state of the optimizers as `KEY/NAME` (exp_avg, momentum_buffer,
        step), for the parameter's NAME in the model. Shards are DTensors in the memory of the originals; step counters,
        which are equal on all ranks, are plain.
        """
        named = {MASTER + self._names[id(parameter)]: parameter.detach() for parameter in self.parameters}
        for optimizer, parameter, state in self._states():
            is_in_8_bits = self._config.optimizer == "adamw_8bit" and optimizer is self._special
            for key, value in saved_states(state, parameter) if is_in_8_bits else state.items():
                named[f"{key}/{self._names[id(parameter)]}"] = _sharded_like(value, parameter)
        return named

    @property
    def has_states(self) -> bool:
        """Whether there was an update, or `create_states`."""
        return any(optimizer.state for optimizer in self.optimizers)

    def drop_states(self) -> None:
        """Drops all states, so that the next update is the first one."""
        for optimizer in self.optimizers:
            optimizer.state.clear()
        if isinstance(self._adamw, BFloat16AdamW):
            self._adamw.num_updates = 0

    def create_states(self, names: Collection[str]) -> None:
        """Collective. Gives these parameters the states that their first update would create. Weights stay as they are:
        it is an update by a gradient of 0, at a learning rate of 0."""
        for parameter in self.parameters:
            parameter.grad = torch.zeros_like(parameter) if self._names[id(parameter)] in names else None
        self._set_learning_rates(0.0)
        for optimizer in self.optimizers:
            optimizer.step()
        self.zero_grad()

    def numbers(self) -> dict[str, Any]:
        """What a training state holds beside tensors."""
        return {
            "num_steps": self.num_steps,
            "num_nonfinite_in_a_row": self._num_nonfinite_in_a_row,
            "num_updates": self._adamw.num_updates if isinstance(self._adamw, BFloat16AdamW) else None,
            "loss_scaler": None if self.scaler is None else self.scaler.state_dict(),
            "steps": {
                self._names[id(parameter)]: state["step"]
                for _, parameter, state in self._states()
                if isinstance(state.get("step"), int)  # as bitsandbytes counts them
            },
        }

    def check_numbers(self, numbers: Mapping[str, Any]) -> None:
        """Raises ModelError unless the optimizer that the numbers come from has a loss scale exactly if this one
        does."""
        if (numbers["loss_scaler"] is None) != (self.scaler is None):
            saved, here = ("without", "with") if self.scaler is not None else ("with", "without")
            raise ModelError(
                f"the state was saved by an engine {saved} float16 gradients, this one is {here} them "
                "(engine.param_dtype, reduce_dtype, and param_dtype in module_precision), and only they have a loss "
                f"scale; resume with the same dtypes, {BEGIN_WITHOUT_STATE}"
            )

    def load_numbers(self, numbers: Mapping[str, Any]) -> None:
        """Takes over what `numbers` returned for another optimizer of this kind."""
        self.num_steps = numbers["num_steps"]
        self._num_nonfinite_in_a_row = numbers["num_nonfinite_in_a_row"]
        if isinstance(self._adamw, BFloat16AdamW):
            self._adamw.num_updates = numbers["num_updates"]
        if self.scaler is not None:
            self.scaler.load_state_dict(numbers["loss_scaler"])
        for _, parameter, state in self._states():
            if isinstance(state.get("step"), int):
                state["step"] = numbers["steps"][self._names[id(parameter)]]

    def _groups(self) -> Iterator[tuple[torch.optim.Optimizer, dict[str, Any], ParameterGroup]]:
        """Yields (optimizer, one of its groups, what the group was made from)."""
        for optimizer, described in ((self._special, self._special_groups), (self._adamw, self._adamw_groups)):
            for group, made_from in zip(optimizer.param_groups if optimizer else [], described, strict=True):
                assert optimizer is not None
                yield optimizer, group, made_from

    def _states(self) -> Iterator[tuple[torch.optim.Optimizer, nn.Parameter, dict[str, Any]]]:
        """Yields (optimizer, parameter, states of the parameter), for each that has states there, maybe under an
        alias."""
        for optimizer, group, made_from in self._groups():
            for alias, parameter in zip(group["params"], made_from.parameters, strict=True):
                if alias in optimizer.state:
                    yield optimizer, parameter, optimizer.state[alias]

    def _is_overflow(self, num_bad_losses: int) -> bool:
        """Collective. Whether a smaller loss scale may cure gradients that are not finite. It cannot cure a loss on any
        rank, since losses are scaled after they are computed."""
        if self.scaler is None or self.scaler.is_at_minimum:
            return False
        return not any(all_gather_json(num_bad_losses) if dist.is_initialized() else [num_bad_losses])

    def _set_learning_rates(self, share: float) -> None:
        for _, group, made_from in self._groups():
            learning_rate = made_from.peak_learning_rate * share
            if isinstance(group["lr"], Tensor):  # torchao reads it inside a compiled kernel
                group["lr"].fill_(learning_rate)
            else:
                group["lr"] = learning_rate

    def _learning_rates(self, share: float) -> Metrics:
        """The learning rates as metrics, when the schedule is at this share of the peak."""
        peaks = {f"train/learning_rate/{prefix}": peak for prefix, peak in self._config.module_learning_rates.items()}
        peaks = {"train/learning_rate": self._config.learning_rate} | peaks
        return {name: MetricValue.max(peak * share) for name, peak in peaks.items()}

    def _unscale_and_clip(self, norm: float, scale: float) -> None:
        limit = self._config.max_grad_norm
        factor = (1.0 if limit is None or norm <= limit else limit / norm) / scale
        if factor != 1.0:
            gradients = [p.grad for p in self.parameters if p.grad is not None]
            torch._foreach_mul_([local_shard(gradient) for gradient in gradients], factor)

    def _require_progress(self, norm: float) -> None:
        if self._num_nonfinite_in_a_row >= self._config.max_nonfinite_steps:
            raise TrainingError(
                f"the gradient norm was {norm} in {self._num_nonfinite_in_a_row} optimizer steps in a row "
                f"(trainer.max_nonfinite_steps={self._config.max_nonfinite_steps}); no weight was changed by them. "
                "Lower trainer.learning_rate, or look with `shardwise replay` at the first of them, which is kept in "
                "nonfinite/ of trainer.output_dir"
            )


def global_grad_norm(parameters: Sequence[nn.Parameter], losses: Sequence[Tensor] = ()) -> float:
    """Collective. The L2 norm of the whole gradient, the same number on every rank; not finite if any element is not,
    NaN if any of the losses [] of any rank is not.

    One all-reduce for each way of sharding (mesh and placements), over the axes that shard; replicas hold equal
    gradients already, so they compare losses only. All ranks have gradients for the same parameters; without any the
    norm is 0.
    """
    by_layout: dict[object, list[nn.Parameter]] = {}
    for parameter in parameters:
        if parameter.grad is not None:
            layout = (parameter.device_mesh, parameter.placements) if isinstance(parameter, DTensor) else None
            by_layout.setdefault(layout, []).append(parameter)
    poison = 0.0 * torch.stack([loss.double() for loss in losses]).sum() if losses else None
    squares = [_sum_of_squares(alike, poison) for alike in by_layout.values()]
    square = torch.stack(squares).sum().item() if squares else 0.0
    return math.sqrt(square) if math.isfinite(square) else square


def _sum_of_squares(parameters: Sequence[nn.Parameter], poison: Tensor | None) -> Tensor:
    """Collective. Returns the sum of squares [] float64 of all gradients of parameters that are sharded alike, over all
    ranks, plus the poison [] of every rank: 0, or NaN."""
    gradients = [piece for p in parameters if p.grad is not None for piece in _summable(local_shard(p.grad))]
    square = torch.stack(torch._foreach_norm(gradients, 2, dtype=torch.float32)).double().square().sum()
    shard_groups: list[dist.ProcessGroup] = []
    first = parameters[0]
    if isinstance(first, DTensor):
        mesh = first.device_mesh
        square = square.to(mesh.device_type)  # gradients may be in host memory (CPU offload)
        for axis, placement in enumerate(first.placements):
            if is_sharded(placement):
                shard_groups.append(mesh.get_group(axis))
            elif poison is not None:
                dist.all_reduce(poison, group=mesh.get_group(axis))
    if poison is not None:
        square = square + poison
    for group in shard_groups:
        dist.all_reduce(square, group=group)
    return square


def _summable(tensor: Tensor) -> Sequence[Tensor]:
    """Returns a tensor in pieces that a norm in float32 is right for. On a CPU torch adds squares up in a few sums,
    which stop growing: a norm of 1e8 numbers comes out a hundredth too small."""
    return tensor.reshape(-1).split(_SUMMABLE_NUMBERS) if tensor.device.type == "cpu" else [tensor]


def _common_dtype(trained: Sequence[TrainedParameter], config: OptimizerConfig) -> torch.dtype:
    """Returns the dtype of all trained parameters. Raises ConfigError: they have several, or the optimizer does not
    support it."""
    example = {one.parameter.dtype: one.name for one in trained}
    if len(example) > 1:
        given = ", ".join(f"{name} is {dtype}" for dtype, name in example.items())
        raise ConfigError(f"trained weights have {len(example)} dtypes ({given}); the optimizer needs one for all")
    (dtype,) = example
    supported = [torch.float32, torch.bfloat16] if config.optimizer == "adamw" else [torch.float32]
    if dtype not in supported:
        raise ConfigError(
            f"trainer.optimizer={config.optimizer} with weights in {dtype}: it supports "
            f"{' and '.join(map(str, supported))}; set engine.master_dtype=float32"
            + (" or trainer.optimizer=adamw" if dtype == torch.bfloat16 else "")
        )
    return dtype


def _is_special(one: TrainedParameter, config: OptimizerConfig) -> bool:
    """Whether Muon or AdamW in 8 bits trains this parameter, instead of plain AdamW."""
    match config.optimizer:
        case "muon":
            return one.is_hidden_matrix
        case "adamw_8bit":
            return has_whole_blocks(one.parameter)
        case "adamw" | "adamw_cpu":
            return False


def _build_special(groups: list[ParameterGroup], config: OptimizerConfig) -> torch.optim.Optimizer | None:
    """Builds Muon or AdamW in 8 bits, for float32 weights; None for other optimizers."""
    match config.optimizer:
        case "muon":
            _require_any(groups, config, "no matrix", "embeddings and output projections are AdamW's")
            return ShardedMuon(
                [
                    torch_group | {"is_transposed": group.is_transposed}
                    for torch_group, group in zip(_torch_groups(groups), groups, strict=True)
                ],
                momentum=config.muon_momentum,
                num_iterations=config.muon_num_iterations,
                adjust_lr=config.muon_adjust_lr,
            )
        case "adamw_8bit":
            why = f"each rank's part has to be whole blocks of {BLOCK_ELEMENTS} elements, {MIN_ELEMENTS} at least"
            _require_any(groups, config, "no matrix to quantise", why)
            return build_adamw_8bit(_torch_groups(groups), betas=config.adam_betas, eps=config.adam_eps)
        case "adamw" | "adamw_cpu":
            return None


def _require_any(groups: list[ParameterGroup], config: OptimizerConfig, nothing: str, why: str) -> None:
    if not groups:
        raise ConfigError(
            f"trainer.optimizer={config.optimizer} finds {nothing} among the trained weights ({why}); set "
            "trainer.optimizer=adamw"
        )


def _build_adamw(groups: list[ParameterGroup], config: OptimizerConfig) -> torch.optim.Optimizer:
    """Builds AdamW for float32 weights."""
    torch_groups, betas, eps = _torch_groups(groups), config.adam_betas, config.adam_eps
    if config.optimizer == "adamw_cpu":
        return HostAdamW(torch_groups, betas=betas, eps=eps)
    fused = config.adamw_implementation == "fused"
    return torch.optim.AdamW(torch_groups, betas=betas, eps=eps, fused=fused, foreach=not fused)


def _torch_groups(groups: Sequence[ParameterGroup]) -> list[dict[str, Any]]:
    """Returns the groups as torch's optimizers take them. The learning rate is set before every step."""
    return [
        {"params": group.parameters, "lr": group.peak_learning_rate, "weight_decay": group.weight_decay}
        for group in groups
    ]


def _sharded_like(state: Tensor, parameter: Tensor) -> Tensor:
    """Returns a state in the same memory, as a DTensor if the parameter is one and the state holds a number for each of
    its elements."""
    if state.dim() == 0 or isinstance(state, DTensor) or not isinstance(parameter, DTensor):
        return state
    return DTensor(state, parameter._spec, requires_grad=False)  # from_local would move host memory to the device


def _plain_tensors(tensor: Tensor) -> Iterator[Tensor]:
    """Yields the tensors inside a wrapper subclass (DTensor, torchao's quantized states), or the tensor itself."""
    if type(tensor) is Tensor:
        yield tensor
        return
    names, _ = cast(Any, tensor).__tensor_flatten__()  # torch's protocol of wrapper subclasses
    for inner in (getattr(tensor, name) for name in names):
        if isinstance(inner, Tensor):  # a DTensor lists its mesh too
            yield from _plain_tensors(inner)
