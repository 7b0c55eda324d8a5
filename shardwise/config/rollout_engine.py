"""What samples completions: Shardwise's own generation, or vLLM."""

from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field, PositiveInt

from shardwise.config.base import Choice, by_type


class EmbeddedRollout(Choice):
    """Shardwise's own batched generation, on every rank that samples."""

    tag: ClassVar[str] = "type"
    type: Literal["embedded"] = "embedded"
    """embedded: Shardwise's own batched generation; vllm: a vLLM engine on each of the trainer's ranks, in their
    processes. The name alone stands for the defaults."""
    compile_decode: bool = False
    """torch.compile the forward pass of a decode step, attention excepted. The first batch is slow, later ones are
    faster; on a CPU it needs a C++ compiler. A single row is not compiled. Tokens and logprobs stay the
    same but for rounding."""

    @property
    def keeps_prefixes(self) -> bool:
        """Whether what is computed of a prompt's beginning serves later requests."""
        return False


class VllmRollout(Choice):
    """A vLLM engine on each of the trainer's ranks, in their processes; see docs/rollout.md."""

    tag: ClassVar[str] = "type"
    type: Literal["vllm"] = "vllm"
    """vllm: a vLLM engine on each of the trainer's ranks."""
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
    args: dict[str, Any] = Field(default_factory=dict)
    """Further arguments of vLLM's EngineArgs, such as enforce_eager, max_model_len or kv_cache_memory_bytes."""

    @property
    def keeps_prefixes(self) -> bool:
        """As EmbeddedRollout's."""
        return self.enable_prefix_caching


RolloutEngineConfig = Annotated[EmbeddedRollout | VllmRollout, Field(discriminator="type"), by_type("embedded")]
