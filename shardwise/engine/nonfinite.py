"""Where numbers stop being finite: hooks on every module, for one more pass over the micro-batches of a bad step.

Shapes: t tokens that a rank computes of a micro-batch.
"""

import math
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.utils._pytree import MappingKey, tree_leaves_with_path

from shardwise.engine.model import ScoringModel
from shardwise.engine.names import CONTAINERS
from shardwise.engine.shards import local_shard
from shardwise.engine.token_slice import TokenSlice
from shardwise.ops import plain_name

Phase = Literal["forward", "loss", "backward", "gradient"]
PHASES: tuple[Phase, ...] = ("forward", "loss", "backward", "gradient")
"""In the order in which a micro-batch goes through them."""
LOSS = "the loss function"
"""Stands for the loss function among the names of modules."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    """The first tensor of a micro-batch, in the order of execution, that is not finite.

    Example: `Fault(micro_batch=0, phase="forward", module="model.layers.3.mlp.down_proj", shape=[1, 9, 64], num_nan=9,
    num_inf=0, max_abs=3.25, token=0)`
    """

    micro_batch: int
    """Place of the micro-batch among those of the pass."""
    phase: Phase
    """forward: a module's output. loss: the loss. backward: the gradient that a module gives back for its input, or the
    loss function for the model's output. gradient: that of a weight, summed over ranks, where all of those are
    finite."""
    module: str
    """Name of the module in transformers; for the phase gradient the name of the weight."""
    shape: list[int]
    num_nan: int
    num_inf: int
    max_abs: float
    """Largest absolute value of the finite elements."""
    order: int = 0
    """How many tensors of the micro-batch this rank checked before. Ranks that share a micro-batch check the same ones,
    so that the fault began on the rank with the lowest number."""
    token: int | None
    """Which of this rank's tokens is the first with such an element; None if the tensor does not have elements for each
    token."""

    def __str__(self) -> str:
        what = {
            "forward": f"forward: the output of {self.module}",
            "loss": "forward: the loss",
            "backward": f"backward: the gradient that {self.module} gives back",
            "gradient": f"backward: the gradient of {self.module}, summed over ranks,",
        }[self.phase]
        return (
            f"{what} has {self.num_nan:,} NaN and {self.num_inf:,} Inf among {math.prod(self.shape):,} numbers, the "
            f"largest other is {self.max_abs:.3g}"
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Diagnosis:
    """What a pass with hooks saw on this rank."""

    losses: list[float]
    """This rank's share of the loss of the step, for each micro-batch."""
    grad_norm: float
    """Norm over all ranks; NaN also if the loss of any rank is not finite."""
    faults: list[Fault]
    """At most one for each micro-batch. What only follows from a fault in an earlier micro-batch is not among them."""


class FaultWatch:
    """Keeps the first tensor of each micro-batch that is not finite."""

    def __init__(self, model: ScoringModel) -> None:
        self._parameters = [(plain_name(name), one) for name, one in model.hf_model.named_parameters()]
        self._faults: dict[int, Fault] = {}
        self._micro_batch = -1
        self._num_checked = 0
        """Number of tensors of this micro-batch that were checked."""
        self._tokens: TokenSlice | None = None

    @property
    def faults(self) -> list[Fault]:
        """The faults so far, including those in the weights' gradients after the newest micro-batch."""
        self._check_gradients()
        return list(self._faults.values())

    def begin(self, tokens: TokenSlice) -> None:
        """Begins the next micro-batch."""
        self._check_gradients()
        self._micro_batch += 1
        self._num_checked = 0
        self._tokens = tokens

    def check(self, tensor: Tensor, *, phase: Phase, module: str) -> None:
        """Notes a tensor if it is the first of its micro-batch that is not finite."""
        self._num_checked += 1
        if self._micro_batch in self._faults or tensor.isfinite().all():
            return
        is_finite = tensor.isfinite()
        self._faults[self._micro_batch] = Fault(
            micro_batch=self._micro_batch,
            phase=phase,
            module=module,
            shape=list(tensor.shape),
            num_nan=int(tensor.isnan().sum()),
            num_inf=int(tensor.isinf().sum()),
            max_abs=float(torch.where(is_finite, tensor, 0).abs().max()),
            order=self._num_checked - 1,
            token=self._first_token(~is_finite) if phase in ("forward", "backward") else None,
        )

    def _check_gradients(self) -> None:
        """Checks the weights' gradients unless there was a fault: a gradient that is not finite stays so for the rest
        of the step."""
        if self._micro_batch < 0 or self._faults:
            return
        for name, parameter in self._parameters:
            if parameter.grad is not None:
                self.check(local_shard(parameter.grad), phase="gradient", module=name)

    def _first_token(self, is_bad: Tensor) -> int | None:
        """The first of this rank's tokens with a bad element. Layers give [1, t, ...], a head gives one number for each
        state that it scores; None for other shapes."""
        assert self._tokens is not None
        num_tokens, states = len(self._tokens.input_ids), self._tokens.states
        if is_bad.dim() == 1 and len(is_bad) == len(states):
            return int(states[is_bad.nonzero()[0, 0]])
        if is_bad.shape[:2] == (1, num_tokens):
            return int(is_bad.reshape(num_tokens, -1).any(1).nonzero()[0, 0])
        return None


@contextmanager
def watched(model: ScoringModel) -> Iterator[FaultWatch]:
    """Inside this context, checks every module's outputs and the gradients of its outputs and inputs, waiting for the
    device each time. Compiled layers are computed operation by operation, so that the modules in them are seen.

    What modules compute stays as it is, bit for bit. Where several take the same tensor, its gradient may be summed in
    another order.
    """
    watch = FaultWatch(model)
    with ExitStack() as stack:
        stack.enter_context(torch.compiler.set_stance("force_eager"))

        def keep(handle: torch.utils.hooks.RemovableHandle) -> None:
            stack.callback(handle.remove)

        keep(model.register_forward_pre_hook(lambda _, args: watch.begin(args[0])))
        for name, user, module in _modules(model):
            keep(module.register_forward_pre_hook(partial(_watch_inputs, watch, name), with_kwargs=True))
            keep(module.register_forward_hook(partial(_watch_outputs, watch, name, user)))
        yield watch


_DIVERGENCE: tuple[Any, ...] = (MappingKey("divergence"),)
"""Path of the divergence among the outputs of a head."""


def _modules(model: ScoringModel) -> Iterable[tuple[str, str, nn.Module]]:
    """Yields (name, name of what uses its output beside other modules, module). The head goes by the name of its
    projection."""
    named = {plain_name(path): module for path, module in model.hf_model.named_modules()}
    head = next(name for name, module in named.items() if module is model.head.projection)
    for path, module in model.hf_model.named_modules():
        name = plain_name(path)
        if path and not isinstance(module, CONTAINERS):
            yield name, _parent(name, named) or head, module
    yield head, LOSS, model.head


def _parent(name: str, named: dict[str, nn.Module]) -> str:
    """The name of the module that calls it; "" for the outermost."""
    parent = name.rpartition(".")[0]
    return _parent(parent, named) if isinstance(named[parent], CONTAINERS) else parent


def _watch_inputs(
    watch: FaultWatch, name: str, _: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Puts a view before every input: its gradient is the part that comes through this module, without that of others
    that take the same tensor."""

    def viewed(value: Any) -> Any:
        if not (isinstance(value, Tensor) and value.requires_grad and torch.is_grad_enabled()):
            return value
        view = value.view_as(value)
        view.register_hook(partial(watch.check, phase="backward", module=name))
        return view

    return tuple(map(viewed, args)), {key: viewed(value) for key, value in kwargs.items()}


def _watch_outputs(watch: FaultWatch, name: str, user: str, _: nn.Module, args: Any, outputs: Any) -> None:
    """Checks a module's outputs and their gradients. A gradient that is bad when it arrives at an output, but was not
    in any module that took the output, is the fault of `user`, which uses it outside of modules."""
    for path, output in tree_leaves_with_path(outputs):
        if isinstance(output, Tensor) and output.is_floating_point():
            module = f"{name} (divergence)" if path == _DIVERGENCE else name  # it may be the user's function
            watch.check(output.detach(), phase="forward", module=module)
            if output.requires_grad and torch.is_grad_enabled():
                output.register_hook(partial(watch.check, phase="backward", module=user))
