"""The model, how it is sharded, and how it is optimized."""

from typing import Annotated, Literal, Self

from pydantic import Field, PositiveInt, model_validator

from shardwise.config.base import Config

DtypeName = Literal["float32", "bfloat16"]


class ModelConfig(Config):
    """Which model is trained, and the tokenizer that belongs to it."""

    path: str
    """A folder in the Hugging Face layout (config.json, *.safetensors, tokenizer), or the name of one on the hub."""
    tokenizer_path: str | None = None
    """A tokenizer folder or hub name; null takes the one beside the model."""
    chat_template: str | None = None
    """A Jinja file that replaces the tokenizer's own chat template."""


class ComputeConfig(Config):
    """What every command that runs a model needs."""

    param_dtype: DtypeName = "float32"
    """The dtype that layers compute in. Master weights and the optimizer are always float32."""
    collective_timeout_seconds: PositiveInt = 600
    """A collective that waits longer than this for another rank ends the run with an error."""


class EngineConfig(ComputeConfig):
    """The layout of one sharded model."""

    fsdp_size: PositiveInt | None = None
    """Ranks that share one copy of the model; null shards over all ranks. Smaller than the world size: HSDP, with
    world_size / fsdp_size replicas."""
    ulysses_size: PositiveInt = 1
    """Ranks that share one sequence (Ulysses sequence parallelism). Only 1 is available in this version."""
    reduce_dtype: DtypeName = "float32"
    """The dtype that gradients are summed over ranks in."""
    reshard_after_forward: bool = True
    """Free a layer's gathered weights after its forward pass and gather them again in backward (less memory)."""
    max_tokens_per_micro_batch: PositiveInt = 4096
    """The hard cap on the tokens of one packed micro-batch on one rank."""


class OptimizerConfig(Config):
    """AdamW, its schedule, and the guards around a step."""

    learning_rate: Annotated[float, Field(ge=0)] = 1e-5
    """The peak learning rate."""
    lr_schedule: Literal["constant", "linear", "cosine", "wsd"] = "constant"
    """The shape after warm-up. wsd is warm-up, stable, then a linear decay over the last `lr_decay_steps`."""
    warmup_steps: Annotated[int, Field(ge=0)] = 0
    """Optimizer steps over which the learning rate rises linearly from 0."""
    lr_decay_steps: Annotated[int, Field(ge=0)] = 0
    """Optimizer steps of the final decay; only for lr_schedule wsd."""
    min_lr_ratio: Annotated[float, Field(ge=0, le=1)] = 0.0
    """The learning rate at the end of linear, cosine and wsd, as a share of the peak."""
    weight_decay: Annotated[float, Field(ge=0)] = 0.0
    """Decoupled weight decay of matrices; norms, biases and embeddings are never decayed."""
    adam_betas: tuple[Annotated[float, Field(ge=0, lt=1)], Annotated[float, Field(ge=0, lt=1)]] = (0.9, 0.95)
    """Decay rates of AdamW's first and second moment."""
    adam_eps: Annotated[float, Field(gt=0)] = 1e-8
    """AdamW's epsilon."""
    max_grad_norm: Annotated[float, Field(gt=0)] | None = 1.0
    """Gradients are scaled down to this global L2 norm; null does not clip."""
    max_nonfinite_steps: PositiveInt = 3
    """A step whose gradient is not finite is skipped; this many in a row end the run."""

    @model_validator(mode="after")
    def _decay_belongs_to_wsd(self) -> Self:
        if self.lr_schedule == "wsd" and self.lr_decay_steps == 0:
            raise ValueError("lr_schedule=wsd needs lr_decay_steps >= 1, the number of final steps that decay")
        if self.lr_schedule != "wsd" and self.lr_decay_steps:
            raise ValueError(
                f"lr_decay_steps={self.lr_decay_steps} has no effect with lr_schedule={self.lr_schedule}; "
                "remove it or set lr_schedule=wsd"
            )
        if self.lr_schedule == "constant" and self.min_lr_ratio:
            raise ValueError(
                f"min_lr_ratio={self.min_lr_ratio} has no effect with lr_schedule=constant; remove it or set "
                "lr_schedule=linear, cosine or wsd"
            )
        return self
