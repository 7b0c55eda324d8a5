"""Training and scoring on one rank: what its engines do with token batches."""

from collections.abc import Iterable
from pathlib import Path

import torch
import torch.distributed as dist

from shardwise.config import ExportError
from shardwise.console import warn
from shardwise.engine import TeacherOutputs
from shardwise.fault_plan import fault_point
from shardwise.recipes.bundles import MAX_BUNDLES, SkippedStep, write_bundle
from shardwise.recipes.losses import LossSource
from shardwise.recipes.rank.hosted_engines import POLICY, HostedEngines
from shardwise.types import Denominators, Metrics, TokenBatch


class Trainer:
    """Trains this rank's engines and scores with them. Its methods are collective over the ranks of an engine."""

    def __init__(self, engines: HostedEngines) -> None:
        self._engines = engines
        self._num_bundles = 0

    def use_loss(self, role: str, source: str) -> None:
        """Replaces an engine's loss, cross-entropy at first, by the one that a LossSource describes."""
        hosted, opened = self._engines[role], LossSource.model_validate_json(source)
        hosted.loss, hosted.loss_source = opened.make(), opened

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
        hosted = self._engines.take_device(role, "params", "optimizer")
        if role == POLICY:
            self._engines.synced_version = None
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
        read = self._engines[role].read_in_turn
        teacher_outputs = self._teacher_outputs(read(batches), role, teacher)
        hosted = self._engines.take_device(role, "params")
        outputs = hosted.engine.forward(read(batches), with_logprobs=False, teacher_outputs=teacher_outputs)
        return [out.divergence for out in outputs if out.divergence is not None]

    def score(
        self, batches: list[TokenBatch], role: str, with_adapters: bool, temperature: float | None = None
    ) -> list[torch.Tensor]:
        """Returns [T] for every micro-batch: logprobs of a language model, values of a critic, scores of a reward
        model. `temperature`: None: the rollout's."""
        hosted = self._engines.take_device(role, "params")
        temperature = hosted.source.temperature if temperature is None else temperature
        outputs = hosted.engine.forward(
            hosted.read_in_turn(batches), temperature=temperature, with_adapters=with_adapters
        )
        found = [out.values if out.logprobs is None else out.logprobs for out in outputs]
        scores = [values for values in found if values is not None]
        first_trained = int(batches[0].loss_mask.int().argmax())
        fault_point("logprob", scores[0][first_trained:])
        return scores

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

    def _teacher_outputs(self, batches: Iterable[TokenBatch], role: str, teacher: str) -> list[TeacherOutputs]:
        """`batches`: with their images read for the engine that learns, which are prepared as for its teacher."""
        divergence = self._engines[role].loss.divergence
        assert divergence is not None, f"{role} has no loss that learns from a teacher"
        return self._engines.take_device(teacher, "params").engine.teacher_outputs(batches, divergence)
