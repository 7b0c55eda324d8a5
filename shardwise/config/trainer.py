"""The loop around an optimizer: how long, from where, what it leaves behind."""

from typing import Annotated, Literal, Self

from pydantic import AfterValidator, Field, PositiveInt, model_validator

from shardwise.config.base import Config, Deadline, PathText
from shardwise.config.engine import EngineConfig, OptimizerConfig
from shardwise.fault_plan import Fault


def _is_fault(text: str) -> str:
    Fault.parse(text)
    return text


class KeepBestConfig(Config):
    """Which checkpoint is the best of a run."""

    metric: Annotated[str, Field(min_length=1)]
    """A name in metrics.jsonl, such as val/accuracy. A checkpoint has the value of its own step, or none."""
    mode: Literal["max", "min"]
    """Whether the highest or the lowest value is the best. Of equal values the earliest is."""


class TrainerConfig(OptimizerConfig):
    """The loop around the optimizer."""

    output_dir: Annotated[PathText, Field(min_length=1)] = "runs/latest"
    """Everything the run writes goes here."""
    total_steps: PositiveInt | None = None
    """Steps of the run; null runs num_epochs over the training rows."""
    num_epochs: PositiveInt = 1
    """Passes over the training rows where total_steps is null. The last batch is filled up with rows of the next pass,
    so fewer rows than a batch come more than once."""
    seed: Annotated[int, Field(ge=0)] = 0
    """Orders rows and seeds sampling. The same seed on the same layout gives the same metrics.jsonl."""
    validate_every_steps: Annotated[int, Field(ge=0)] = 0
    """Validate after every n-th step; 0 only at the end. Without validation files nothing is validated."""
    save_every_steps: Annotated[int, Field(ge=0)] = 0
    """Save a checkpoint after every n-th step; 0 only at the end."""
    keep_last: Annotated[int, Field(ge=0)] = 0
    """Keep this many of the newest checkpoints and remove older ones after each save; 0 keeps all."""
    keep_every_steps: Annotated[int, Field(ge=0)] = 0
    """Keep the checkpoints of every n-th step too, forever; 0 keeps none. A multiple of save_every_steps."""
    keep_best: KeepBestConfig | None = None
    """Keep the best checkpoint too: `{metric: val/accuracy, mode: max}`."""
    on_save_error: Literal["stop", "continue"] = "stop"
    """What to do about a checkpoint that cannot be saved, or a log that cannot be written. stop ends the run. continue
    trains on: the next save tries again, and lines of logs wait in memory (64 MiB a file at most); the run still fails
    at its end if its last checkpoint could not be saved or lines are left."""
    save_retries: Annotated[int, Field(ge=0)] = 1
    """How often a save that failed is tried again, after 1 s, 2 s and so on. A save that would hold NaN or infinities
    is not tried again."""
    save_timeout_seconds: Deadline = 3600.0
    """How long a save in the background may take, retries included, before the run is taken for hung and ends."""
    stall_timeout_seconds: Deadline | None = 7200.0
    """How long rank 0 may stay in one phase or command, or sample without finishing a prompt, before the run is taken
    for hung and ends, with the stacks of every rank. Give more than engine.collective_timeout_seconds, by which ranks
    that wait for each other notice. A wait for ranks that only sample has the deadline
    rollout.placement.timeout_seconds, one for a save in the background save_timeout_seconds: they count here only after
    that. null: no limit."""
    save_state: bool = True
    """Write state/ beside the weights of a checkpoint: what a run is resumed from. 12 bytes for each trained parameter
    with AdamW and float32 masters."""
    async_save: bool = True
    """Copy shards to host memory and write them while training goes on; only the next optimizer step waits for the
    copies. They take 2 or 4 bytes for each parameter of the model plus what save_state writes, shared by the ranks;
    from an accelerator up to twice that, as torch rounds what it pins up to powers of two. false waits for the disk,
    and needs no memory."""
    resume: PathText = "auto"
    """auto resumes from the newest checkpoint in output_dir, if there is one. never starts anew and moves aside what is
    there. A path resumes from that checkpoint (`checkpoints/step_N`) or run's folder; once the run has saved a
    checkpoint of its own that began there, the same command, or one that names a copy, resumes from the run's
    newest."""
    resume_fallback: Literal["previous", "weights", "fail"] = "previous"
    """What resume=auto does where the newest checkpoint is damaged. previous: resumes from the newest one before it
    that is whole. fail: fails. weights: where only shards of training states (state/*/rank_R.safetensors) are damaged,
    engines that lost some resume from their trained weights in hf/ (rounded to engine.param_dtype) or adapter/ with
    optimizer states that begin anew; else as previous. With resume=PATH a damaged checkpoint fails, unless weights are
    enough."""
    resume_allow: list[str] = Field(default_factory=list)
    """Keys that may differ from those of the run that is resumed, although they change what is trained. If they decide
    on the training rows, as `data` does, there may be more rows or fewer."""
    max_time_seconds: Annotated[float, Field(gt=0, le=1e9)] | None = None
    """Save and stop before the job has run this long, with exit code 75: in time for the longest step so far and the
    last save. Counts from the start of the command; under torchrun, which may not restart it, from that of rank 0.
    null: no limit."""
    stop_grace_seconds: Deadline = 30.0
    """How long a run may take after SIGTERM, SIGINT or SIGHUP to finish its step and save; then it ends without
    saving."""
    tensorboard: bool = True
    """Write TensorBoard events to output_dir/tensorboard."""
    faults: list[Annotated[str, AfterValidator(_is_fault)]] = Field(default_factory=list)
    """Faults to rehearse, each once, such as `rank=1 step=7 phase=backward action=kill`: see docs/faults.md."""

    def optimizer_config(self) -> OptimizerConfig:
        """Returns the keys that an engine needs."""
        return OptimizerConfig(**{name: getattr(self, name) for name in OptimizerConfig.model_fields})

    @model_validator(mode="after")
    def _what_is_kept_is_saved(self) -> Self:
        if self.keep_last == 0 and (self.keep_every_steps or self.keep_best is not None):
            key = "keep_every_steps" if self.keep_every_steps else "keep_best"
            raise ValueError(
                f"{key} has no effect with keep_last=0, which keeps every checkpoint; set keep_last to the number of "
                f"the newest ones to keep, or remove {key}"
            )
        if self.keep_every_steps and (not self.save_every_steps or self.keep_every_steps % self.save_every_steps):
            raise ValueError(
                f"keep_every_steps={self.keep_every_steps} is no multiple of save_every_steps={self.save_every_steps}, "
                "so some of the steps to keep are never saved; make it one"
            )
        best = self.keep_best
        if (
            best is not None
            and best.metric.startswith("val/")
            and self.save_every_steps
            and not self.validate_every_steps
        ):
            raise ValueError(
                f"keep_best.metric={best.metric} is measured only at the end with validate_every_steps=0, so no "
                f"checkpoint but the last has it; set validate_every_steps={self.save_every_steps}, as often as "
                "checkpoints are saved"
            )
        return self


class BatchTrainerConfig(TrainerConfig):
    """The loop of training on rows as they are."""

    batch_size: PositiveInt = 32
    """The number of rows in one optimizer step, over all ranks: sequences, or pairs of them."""


def require_states_on_device(layout: EngineConfig, config: OptimizerConfig, *, engine: str, optimizer: str) -> None:
    """Raises ValueError if states that never leave host memory are to be offloaded to it."""
    if layout.optimizer_offload and config.optimizer == "adamw_cpu":
        raise ValueError(
            f"{optimizer}.optimizer=adamw_cpu already keeps its states in host memory, so {engine}.optimizer_offload="
            "true has no effect; remove one of them"
        )


def require_optimizer_fits(layout: EngineConfig, config: OptimizerConfig, *, engine: str, optimizer: str) -> None:
    """Raises ValueError if an optimizer cannot update the layout's weights, or adds nothing to what the layout does.

    Args:
        engine, optimizer: the config keys of the two, for errors.
    """
    if layout.master_dtype != "float32" and config.optimizer != "adamw":
        raise ValueError(
            f"{engine}.master_dtype={layout.master_dtype} with {optimizer}.optimizer={config.optimizer}, which updates "
            f"float32 weights only; set {engine}.master_dtype=float32 or {optimizer}.optimizer=adamw"
        )
    if layout.offload_policy and config.optimizer == "adamw_cpu":
        raise ValueError(
            f"{engine}.offload_policy=true already keeps the optimizer states in host memory and computes the update "
            f"there, so {optimizer}.optimizer=adamw_cpu has no effect; remove one of them"
        )
