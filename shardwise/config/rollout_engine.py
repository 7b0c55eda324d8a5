"""What samples completions: our own generation, vLLM or SGLang; in the process of a rank, or in one of its own."""

from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import Field, NonNegativeInt, PositiveInt, model_validator

from shardwise.config.base import Arguments, Choice, Config, Deadline, PathText, by_type


class EngineProcessConfig(Config):
    """The engine in a process of its own, which may die or hang without its rank: another one takes its place, with the
    weights that it served, and is sent its requests again. {} takes the defaults."""

    max_restarts: NonNegativeInt = 3
    """How many times an engine's process may be replaced in a run; after that the run ends and reports why each was
    lost."""
    start_timeout_seconds: Deadline = 900.0
    """How long a process may take until its engine is there."""
    health_timeout_seconds: Deadline = 60.0
    """A process that leaves a health probe unanswered for so long hangs, and is replaced. It answers while the engine
    works; Python code of a library may keep it from that for seconds."""
    request_timeout_seconds: Deadline = 1800.0
    """A process whose engine finishes no request (no weight sync) for so long hangs too. What it was sent is sent once
    more, to another one; if that fails in the same way, the run ends and names the rows."""


class EmbeddedRollout(Choice):
    """Shardwise's own batched generation, on every rank that samples."""

    tag: ClassVar[str] = "type"
    type: Literal["embedded"] = "embedded"
    """embedded: Shardwise's own batched generation; vllm: a vLLM engine on each rank that samples; sglang: an SGLang
    server beside each of them. The name alone stands for the defaults."""
    compile_decode: bool = False
    """torch.compile the forward pass of a decode step; on a CPU attention and logits have kernels of their own then,
    for which rows of different lengths cost what they are long. The first batch is slow, later ones are faster; on a
    CPU it needs a C++ compiler. A single row is not compiled. Tokens and logprobs stay the same but for rounding."""
    sleep_level: Literal[0, 1] = 0
    """Where the engine's weights are while the trainer computes: 0 on the device, 1 in pinned host memory.
    Needs an accelerator."""
    allow_unproven: bool = False
    """Sample also from a family that docs/models.md does not list as proven for this engine. What is known to be
    computed wrong stays refused."""
    process: EngineProcessConfig | None = None
    """Run the engine in a process of its own, which is replaced where it dies or hangs; null: in that of its rank."""

    @property
    def context_limit(self) -> tuple[str, int] | None:
        """The key that limits a prompt and its completion, and to how many tokens; None: the model's context does."""
        return None

    @property
    def keeps_prefixes(self) -> bool:
        """Whether what is computed of a prompt's beginning serves later requests."""
        return False

    @property
    def ranks_per_engine(self) -> int:
        """Neighbouring ranks that are one engine together, and are asked the same."""
        return 1


class VllmRollout(Choice):
    """A vLLM engine on each rank that samples; see docs/rollout.md."""

    tag: ClassVar[str] = "type"
    type: Literal["vllm"] = "vllm"
    """vllm: a vLLM engine on each rank that samples."""
    gpu_memory_utilization: Annotated[float, Field(gt=0, le=1)] = 0.5
    """The share of the device's memory that vLLM takes for weights, activations and cache; the rest is the trainer's.
    On a CPU it is a share of the machine's memory."""
    max_num_batched_tokens: PositiveInt | None = None
    """Tokens of one forward pass; null leaves it to vLLM."""
    enable_chunked_prefill: bool = True
    """Long prompts are computed in pieces, between the decoding of other rows."""
    enable_prefix_caching: bool = True
    """Prompts that begin alike are computed once; this is how the completions of a group share their prompt."""
    sleep_level: Literal[0, 1, 2] = 0
    """What vLLM gives back while the trainer computes: 0 nothing, 1 its cache, and its weights move to the host, 2 its
    cache and weights, which the next weight sync brings. CUDA only."""
    process: EngineProcessConfig | None = None
    """Run vLLM in a process of its own, which is replaced where it dies or hangs; null: in that of its rank. Needed for
    placement=split."""
    args: Arguments = Field(default_factory=dict)
    """Further arguments of vLLM's EngineArgs, such as enforce_eager, max_model_len or kv_cache_memory_bytes. With
    tensor_parallel_size, neighbouring ranks are one engine together; one with a process of its own starts workers on
    devices beside its rank's instead."""

    @model_validator(mode="after")
    def _devices_are_counted(self) -> Self:
        size = self.args.get("tensor_parallel_size", 1)
        if type(size) is not int or size < 1:  # True is an int, too
            raise ValueError(f"args.tensor_parallel_size={size!r}: give how many devices share the model, 1 or more")
        return self

    @property
    def tensor_parallel_size(self) -> int:
        """Devices that share the model."""
        return int(self.args.get("tensor_parallel_size", 1))

    @property
    def context_limit(self) -> tuple[str, int] | None:
        """As EmbeddedRollout's."""
        return _limit_in(self.args, "max_model_len")

    @property
    def keeps_prefixes(self) -> bool:
        """As EmbeddedRollout's."""
        return self.enable_prefix_caching

    @property
    def ranks_per_engine(self) -> int:
        """As EmbeddedRollout's."""
        return self.tensor_parallel_size if self.process is None else 1

    @property
    def has_workers(self) -> bool:
        """vLLM computes in processes that it starts."""
        return self.tensor_parallel_size > self.ranks_per_engine


class SglangRollout(Choice):
    """An SGLang server beside each rank that samples, on its device; see docs/rollout.md."""

    tag: ClassVar[str] = "type"
    process: ClassVar[None] = None
    """It has processes of its own anyway."""
    type: Literal["sglang"] = "sglang"
    """sglang: an SGLang server beside each rank that samples."""
    python: PathText | None = None
    """The interpreter of the environment that SGLang is installed in, which may hold other releases of torch than the
    trainer's; null is the trainer's own."""
    mem_fraction_static: Annotated[float, Field(gt=0, lt=1)] = 0.5
    """The share of the device's memory that SGLang takes for weights and cache; the rest is the trainer's."""
    enable_prefix_caching: bool = True
    """Prompts that begin alike are computed once; this is how the completions of a group share their prompt."""
    sleep_level: Literal[0, 1, 2] = 0
    """What SGLang gives back while the trainer computes: 0 nothing, 1 its cache, and its weights move to the host, 2
    its cache and weights, which the next weight sync brings."""
    weights_folder: PathText = "/dev/shm"
    """Where the weights of a sync pass through, as safetensors files; each server of a host needs room for a model."""
    load_timeout_seconds: Deadline = 600.0
    """How long the server may take to start, and to load the weights of a sync."""
    health_timeout_seconds: Deadline = 60.0
    """A server that says nothing for so long while it generates is dead."""
    args: Arguments = Field(default_factory=dict)
    """Further arguments of SGLang's server by their names in ServerArgs, such as attention_backend or
    context_length."""

    @property
    def context_limit(self) -> tuple[str, int] | None:
        """As EmbeddedRollout's."""
        return _limit_in(self.args, "context_length")

    @property
    def keeps_prefixes(self) -> bool:
        """As EmbeddedRollout's."""
        return self.enable_prefix_caching

    @property
    def ranks_per_engine(self) -> int:
        """As EmbeddedRollout's."""
        return 1


def _limit_in(args: dict[str, Any], key: str) -> tuple[str, int] | None:
    """Both engines take what is no positive number for a word to choose by themselves, or refuse it."""
    given = args.get(key)
    return (f"rollout.engine.args.{key}", given) if type(given) is int and given > 0 else None


RolloutEngineConfig = Annotated[
    EmbeddedRollout | VllmRollout | SglangRollout, Field(discriminator="type"), by_type("embedded")
]
