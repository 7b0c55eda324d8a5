"""What samples completions: our own generation, vLLM or SGLang; in the process of a rank, or in one of its own."""

from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import Field, NonNegativeInt, PositiveInt, model_validator

from shardwise.config.base import Arguments, Choice, Config, Deadline, PathText, by_type

SGLANG_BANS_NO_TOKENS = (
    "bad_token_ids with engine=sglang: it can give no logprobs of the policy once tokens are left out that way; remove "
    "bad_token_ids, or use engine=embedded"
)
SGLANG_TAKES_NO_MIN_P = (
    "with engine=sglang: it cannot draw so from a seed of each request; set min_p=0, or use engine=embedded"
)


class EngineProcessConfig(Config):
    """The engine in a process of its own, which may die or hang without its rank: another process takes its place, with
    the weights that it served, and is sent its requests again. {} takes the defaults."""

    max_restarts: NonNegativeInt = 3
    """How many times an engine's process may be replaced in a run; after that the run ends and reports why each was
    lost."""
    start_timeout_seconds: Deadline = 900.0
    """How long a process may take to start its engine."""
    health_timeout_seconds: Deadline = 60.0
    """A process that leaves a health probe unanswered for this long is taken for hung and replaced. It answers while
    the engine works, though Python code of a library may keep it from answering for seconds."""
    request_timeout_seconds: Deadline = 1800.0
    """A process whose engine finishes no request (or no weight sync) for this long is taken for hung too. What it was
    sent is sent once more, to another process; if that fails in the same way, the run ends and names the rows."""


class _RolloutEngine(Choice):
    """What recipes ask the config of any engine."""

    tag: ClassVar[str] = "type"

    @property
    def context_limit(self) -> tuple[str, int] | None:
        """The key that limits a prompt with its completion, and to how many tokens; None: only the model's context
        does."""
        return None

    @property
    def keeps_prefixes(self) -> bool:
        """Whether what is computed for the beginning of a prompt serves later requests."""
        return False

    @property
    def ranks_per_engine(self) -> int:
        """How many neighboring ranks form one engine, and are sent the same requests."""
        return 1

    def may_ban_tokens(self, temperature: float) -> bool:
        """Whether some tokens can be kept from being drawn at a temperature, with logprobs that are still of the
        policy."""
        return True


class _CachingEngine(_RolloutEngine):
    """Engines that keep a prefix cache."""

    enable_prefix_caching: bool = True
    """Compute a beginning that prompts share only once; this is how the completions of a group share their prompt."""

    @property
    def keeps_prefixes(self) -> bool:
        """See `_RolloutEngine.keeps_prefixes`."""
        return self.enable_prefix_caching


class EmbeddedRollout(_RolloutEngine):
    """Shardwise's own batched generation, on every rank that samples."""

    type: Literal["embedded"] = "embedded"
    """embedded: Shardwise's own batched generation; vllm: a vLLM engine on each rank that samples; sglang: an SGLang
    server beside each of them. The name alone stands for the defaults."""
    compile_decode: bool = False
    """torch.compile the forward pass of a decode step; on a CPU attention and logits then have kernels of their own, in
    which each row costs only as much as it is long. The first batch is slow, later ones are faster; on a CPU it needs a
    C++ compiler. A single row is not compiled. Tokens and logprobs stay the same except for rounding."""
    sleep_level: Literal[0, 1] = 0
    """Where the engine's weights are while the trainer computes: 0 on the device, 1 in pinned host memory.
    Needs an accelerator."""
    allow_unproven: bool = False
    """Allow a family that docs/models.md does not list as proven for this engine. What is known to be computed wrong
    stays refused."""
    process: EngineProcessConfig | None = None
    """Run the engine in a process of its own, which is replaced where it dies or hangs; null runs it in its rank's."""


class VllmRollout(_CachingEngine):
    """A vLLM engine on each rank that samples; see docs/rollout.md."""

    type: Literal["vllm"] = "vllm"
    """vllm: a vLLM engine on each rank that samples."""
    gpu_memory_utilization: Annotated[float, Field(gt=0, le=1)] = 0.5
    """The share of the device's memory that vLLM takes for weights, activations and cache; the rest is the trainer's.
    On a CPU it is a share of the machine's memory."""
    max_num_batched_tokens: PositiveInt | None = None
    """The most tokens in one forward pass; null leaves it to vLLM."""
    enable_chunked_prefill: bool = True
    """Compute long prompts in pieces, between the decoding of other rows."""
    sleep_level: Literal[0, 1, 2] = 0
    """What vLLM frees on the device while the trainer computes. 0: nothing. 1: its cache, and its weights move to the
    host. 2: its cache and its weights, which the next weight sync brings back. CUDA only."""
    process: EngineProcessConfig | None = None
    """Run vLLM in a process of its own, which is replaced where it dies or hangs; null runs it in its rank's. Needed
    for placement=split."""
    args: Arguments = Field(default_factory=dict)
    """Further arguments of vLLM's EngineArgs, such as enforce_eager, max_model_len or kv_cache_memory_bytes. With
    tensor_parallel_size, neighboring ranks form one engine; an engine with a process of its own instead starts workers
    on devices beside its rank's."""

    @model_validator(mode="after")
    def _devices_are_counted(self) -> Self:
        size = self.args.get("tensor_parallel_size", 1)
        if type(size) is not int or size < 1:  # True is an int, too
            raise ValueError(f"args.tensor_parallel_size={size!r}: give how many devices share the model, 1 or more")
        return self

    @property
    def tensor_parallel_size(self) -> int:
        """How many devices share the model."""
        return int(self.args.get("tensor_parallel_size", 1))

    @property
    def context_limit(self) -> tuple[str, int] | None:
        """See `_RolloutEngine.context_limit`."""
        return _limit_in(self.args, "max_model_len")

    @property
    def ranks_per_engine(self) -> int:
        """See `_RolloutEngine.ranks_per_engine`."""
        return self.tensor_parallel_size if self.process is None else 1

    def may_ban_tokens(self, temperature: float) -> bool:
        """See `_RolloutEngine.may_ban_tokens`. vLLM gives logprobs at temperature 1 before any token is left out, and
        at others after that."""
        return temperature == 1

    @property
    def has_workers(self) -> bool:
        """Whether vLLM computes in processes that it starts itself."""
        return self.tensor_parallel_size > self.ranks_per_engine


class SglangRollout(_CachingEngine):
    """An SGLang server beside each rank that samples, on its device; see docs/rollout.md."""

    process: ClassVar[None] = None
    """None, as SGLang has processes of its own anyway."""
    type: Literal["sglang"] = "sglang"
    """sglang: an SGLang server beside each rank that samples."""
    python: PathText | None = None
    """The interpreter of the environment that SGLang is installed in, which may hold other releases of torch than the
    trainer's; null is the trainer's own."""
    mem_fraction_static: Annotated[float, Field(gt=0, lt=1)] = 0.5
    """The share of the device's memory that SGLang takes for weights and cache; the rest is the trainer's."""
    sleep_level: Literal[0, 1, 2] = 0
    """What SGLang frees on the device while the trainer computes. 0: nothing. 1: its cache, and its weights move to the
    host. 2: its cache and its weights, which the next weight sync brings back."""
    weights_folder: PathText = "/dev/shm"
    """The folder through which the weights of a sync pass, as safetensors files; each server on a host needs room for a
    whole model."""
    load_timeout_seconds: Deadline = 600.0
    """How long the server may take to start, and to load the weights of a sync."""
    health_timeout_seconds: Deadline = 60.0
    """A server that sends nothing for this long while it generates is taken for dead."""
    args: Arguments = Field(default_factory=dict)
    """Further arguments of SGLang's server by their names in ServerArgs, such as attention_backend or
    context_length."""

    @property
    def context_limit(self) -> tuple[str, int] | None:
        """See `_RolloutEngine.context_limit`."""
        return _limit_in(self.args, "context_length")

    def may_ban_tokens(self, temperature: float) -> bool:
        """See `_RolloutEngine.may_ban_tokens`. SGLang leaves tokens out before it takes logprobs."""
        return False


def _limit_in(args: dict[str, Any], key: str) -> tuple[str, int] | None:
    """Returns the key and value of a limit on the context; None unless it is a positive number: the engines take
    anything else for a word to choose by themselves, or refuse it."""
    given = args.get(key)
    number = int(given) if isinstance(given, str) and given.isdecimal() else given
    return (f"rollout.engine.args.{key}", number) if type(number) is int and number > 0 else None


RolloutEngineConfig = Annotated[
    EmbeddedRollout | VllmRollout | SglangRollout, Field(discriminator="type"), by_type("embedded")
]
