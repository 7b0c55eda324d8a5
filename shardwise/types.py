"""The data types that every folder shares (prompts, completions, samples, batches, metrics), and the protocols
between them: WeightReceiver (rollout) of a weight sync, Connections between ranks.

Shape letters: L tokens of one sequence, T tokens of one packed batch, S sequences of one packed batch.
Every per-token array is aligned with the token it scores; position 0 of a sequence has no prediction and is never
trained.
"""

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, fields, replace
from itertools import compress
from typing import Any, Literal, Protocol, Self

import torch
import torch.distributed as dist
from torch import Tensor

from shardwise.uploads import to_device


@dataclass(frozen=True, slots=True, kw_only=True)
class Images:
    """What a model with a vision tower sees in one sequence: I images, in the order of their placeholders."""

    pixel_values: Tensor
    """[N, F] float32: N patches of F values, of all images in rows from the top (Qwen, GLM, Pixtral, Gemma 4, LFM2-VL);
    or N tiles of 3 channels, height and width (InternVL, LLaVA, Gemma 3, Idefics 3)."""
    num_patches: Tensor
    """[I] int64: how many of them each image has."""
    num_tokens: Tensor
    """[I] int64: how many tokens of a sequence stand for each image."""
    sizes: Tensor
    """[I, 3] int64: patches of each image in time, height and width, before they are merged (Qwen, GLM); or [I, 2]: its
    height and width in pixels; or [I, 5]: its tiles (LFM2-VL: see Lfm2VlTower)."""

    @classmethod
    def joined(cls, parts: "Sequence[Images]") -> Self:
        """Puts images one behind the other; at least one of `parts`."""
        names = [part.name for part in fields(cls)]
        return cls(**{name: torch.cat([getattr(part, name) for part in parts]) for name in names})

    def to(self, device: torch.device) -> "Images":
        """Returns a copy with the pixels on `device`. Counts and sizes stay on the host, which reads them."""
        return replace(self, pixel_values=to_device(self.pixel_values, device))


@dataclass(frozen=True, slots=True, kw_only=True)
class ImageRef:
    """A reference to an image that is not decoded yet; the rank that needs it decodes it. Either `path` or `data` is
    set."""

    name: str
    """Names the image in errors: its row, its number in the row, and its file."""
    path: str | None = None
    data: Tensor | None = None
    """[num_bytes] uint8, the bytes of the file."""
    num_patches: int
    num_tokens: int
    size: list[int]
    """The row of the image in `Images.sizes`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Example:
    """One prompt to answer, and what its reward function needs.

    Example: `Example(uid="train.jsonl:7", prompt_ids=[5, 9, 2], prompt="2+3=", data_source="sums", ground_truth="5")`
    """

    uid: str
    """Names the row in errors and dumps: file and line."""
    prompt_ids: list[int]
    """The prompt as the model reads it, chat template included."""
    prompt: str
    """The prompt as text, for people."""
    data_source: str
    ground_truth: Any
    extra_info: dict[str, Any] = field(default_factory=dict)
    messages: list[dict[str, Any]] | None = None
    """The conversation that the prompt renders, for models with another chat template: contents are strings as the row
    has them, with `<image>` for an image if there are `image_refs`, or lists of `{"type": "text", "text": ...}` and
    `{"type": "image"}`. None for plain text."""
    tools: list[str] | None = None
    """The names of the tools that this prompt offers; None: all of them."""
    image_refs: list[ImageRef] = field(default_factory=list)
    """The images of the prompt; their tokens are in `prompt_ids`."""
    position_ids: Tensor | None = None
    """[3, L] int64, for prompts with images, as in `Sample`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerateRequest:
    """A prompt and how to continue it.

    Example: `GenerateRequest(uid="a.jsonl:7", prompt_ids=[5, 9], num_completions=8, max_tokens=64, temperature=1.0)`
    """

    uid: str
    """Together with `seed`, the completion's index and the token positions it determines the random draws, whatever
    else is in the batch. A later turn starts at later positions, so it gets fresh draws."""
    prompt_ids: list[int]
    num_completions: int = 1
    max_tokens: int
    temperature: float
    """0 is greedy."""
    top_k: int = 0
    """Sample from the k most likely tokens; 0 disables it."""
    top_p: float = 1.0
    """Nucleus sampling: sample from the most likely tokens that together have this probability; 1 disables it."""
    min_p: float = 0.0
    """Drop tokens less likely than this times the most likely token's probability; 0 disables it."""
    stop: list[str] = field(default_factory=list)
    """A completion ends where its text holds one of these, which it keeps."""
    seed: int = 0
    prefix_key: int = 0
    """Routing key: requests with the same value share a prompt prefix (the turns of a prompt's episodes) and go to the
    same engine where engines cache prefixes."""
    first_index: int = 0
    """The index of this request's first completion among those of its prompt; not 0 where it continues later ones."""
    partial_token_ids: list[int] = field(default_factory=list)
    """Tokens of a single completion that were sampled before an interruption; the engine continues after them, and
    `max_tokens` counts new tokens only. Where an engine draws by position (embedded), the result is the same as
    without the interruption; else (vLLM) the rest gets another seed."""
    with_experts: bool = False
    """Keep which experts every token goes to."""
    images: Images | None = None
    """The images of the prompt, which has a token for each part of them."""
    image_refs: list[ImageRef] = field(default_factory=list)
    """In place of `images`, references to images that are not read yet; engines want them read."""

    @property
    def restricts(self) -> bool:
        """Whether some tokens may not be drawn."""
        return self.top_k > 0 or self.top_p < 1 or self.min_p > 0

    def one_by_one(self) -> list[Self]:
        """Returns a request for each of its completions, with draws of its own: the uid says which one it is."""
        return [replace(self, uid=f"{self.uid}/{index}", num_completions=1) for index in range(self.num_completions)]


@dataclass(frozen=True, slots=True, kw_only=True)
class SampledSpan:
    """Tokens of one sequence that a rollout engine sampled in one call, with a digest that proves they are trained
    on as sampled."""

    start: int
    """Index of the first of them, counted from the beginning of the prompt."""
    end: int
    """Index just after the last of them."""
    digest: int
    """xxh3 of all tokens before `end`, as int64: those that the engine read, and those that it sampled after them."""


FinishReason = Literal["stop", "length", "interrupted"]
"""length: cut off by a limit on tokens or turns. interrupted: the engine can continue it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Completion:
    """The tokens after a prompt. A rollout engine samples all of them; with an environment, its observation tokens are
    interleaved with the policy's turns."""

    token_ids: list[int]
    """End-of-sequence tokens included."""
    logprobs: list[float]
    """The logprob of each sampled token, in nats, under the distribution it was drawn from (temperature applied;
    greedy: at 1); 0 for an environment's tokens."""
    finish_reason: FinishReason
    policy_version: int
    """The version of the weights that sampled its first token: no token is older."""
    token_versions: list[int] | None = None
    """The version that sampled each token; an environment's token has that of the token before. None: policy_version
    sampled all."""
    is_sampled: list[bool] | None = None
    """Which tokens the policy sampled; None: all."""
    turn_starts: list[int] = field(default_factory=lambda: [0])
    """Indices of the tokens that begin turns of the policy. `is_sampled` cannot tell: turns may directly follow each
    other."""
    prompt_ids: list[int] | None = None
    """The prompt that it answers, where an agent wrote one of its own; None: that of its row."""
    experts: Tensor | None = None
    """[L - 1, M, k] int16, for the L tokens of prompt and completion: which k experts each of M routers sent them to.
    The last token went nowhere. None unless asked for."""
    spans: list[SampledSpan] = field(default_factory=list)
    """One for each call that sampled its tokens, in their order; the rank that asks the engine adds them."""

    @property
    def num_turns(self) -> int:
        """The number of turns of the policy."""
        return len(self.turn_starts)

    @property
    def versions(self) -> list[int]:
        """The policy version that sampled each token."""
        return self.token_versions or [self.policy_version] * len(self.token_ids)

    @property
    def sampled_versions(self) -> list[int]:
        """The policy version of each token that the policy sampled, without an environment's tokens."""
        flags = [True] * len(self.token_ids) if self.is_sampled is None else self.is_sampled
        return list(compress(self.versions, flags))

    @property
    def newest_version(self) -> int:
        """The newest policy version that sampled a token."""
        return self.token_versions[-1] if self.token_versions else self.policy_version

    def then(self, more: Self) -> Self:
        """Returns this completion extended by the tokens of `more`, with the finish_reason of `more` and the turns of
        this one."""
        versions = self.versions + more.versions
        sampled = [
            flag
            for part in (self, more)
            for flag in ([True] * len(part.token_ids) if part.is_sampled is None else part.is_sampled)
        ]
        return replace(
            self,
            token_ids=self.token_ids + more.token_ids,
            logprobs=self.logprobs + more.logprobs,
            finish_reason=more.finish_reason,
            policy_version=self.policy_version if self.token_ids else more.policy_version,
            token_versions=versions if len(set(versions)) > 1 else None,
            is_sampled=None if self.is_sampled is None and more.is_sampled is None else sampled,
            experts=self._experts_then(more),
            spans=self.spans + more.spans,
        )

    def _experts_then(self, more: Self) -> Tensor | None:
        """Joins the experts of both. A continued request computes the tokens so far once more, maybe with other
        weights: their first choice counts."""
        if more.experts is None:  # interrupted before its first token
            return self.experts
        if self.experts is None:
            return more.experts
        return torch.cat([self.experts, more.experts[len(self.experts) :]])

    @property
    def num_sampled(self) -> int:
        """The number of tokens that the policy sampled."""
        return len(self.token_ids) if self.is_sampled is None else sum(self.is_sampled)


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """One sequence to train on.

    Example: a prompt of two tokens and a completion of three:
        Sample(uid="a", token_ids=tensor([5, 9, 2, 7, 1]), loss_mask=tensor([False, False, True, True, True]))
    """

    uid: str
    token_ids: Tensor
    """[L] int64."""
    loss_mask: Tensor
    """[L] bool, True = trained (in reinforcement learning: sampled by the policy). loss_mask[0] is False."""
    position_ids: Tensor | None = None
    """[3, L] int64, for sequences with images: where a token is in time, height and width. None: 0 to L - 1 in each."""
    images: Images | None = None
    image_refs: list[ImageRef] = field(default_factory=list)
    """In place of `images`, references to images that are not read yet."""
    rollout_logprobs: Tensor | None = None
    """[L] float32, of the distribution that sampled the tokens; 0 where not trained, as every other array here is."""
    old_logprobs: Tensor | None = None
    """[L] float32, of the policy before the first optimizer step on this sample."""
    ref_logprobs: Tensor | None = None
    """[L] float32, of the frozen reference policy."""
    advantages: Tensor | None = None
    """[L] float32."""
    values: Tensor | None = None
    """[L] float32, of the critic before the first optimizer step on this sample."""
    returns: Tensor | None = None
    """[L] float32, what the critic learns to predict."""
    importance_weights: Tensor | None = None
    """[L] float32, what each token's policy loss is multiplied by to correct for the rollout engine's distribution."""
    selected: Tensor | None = None
    """[L] bool, the tokens that clip_cov and kl_cov pick out of a whole optimizer step."""
    experts: Tensor | None = None
    """[L, M, k] int16: which k experts each of the policy's M routers sends the tokens to; -1: the router chooses."""
    turn_starts: list[int] | None = None
    """Indices of the tokens that begin turns of the policy, in reinforcement learning."""
    spans: list[SampledSpan] | None = None
    """The spans of its completion, which its trained tokens must match; None where no rollout engine sampled it."""
    reward: float = 0.0
    group: int = 0
    """Samples of one prompt share this number."""

    def __post_init__(self) -> None:
        assert self.token_ids.shape == self.loss_mask.shape, (self.token_ids.shape, self.loss_mask.shape)
        assert len(self.loss_mask) == 0 or not self.loss_mask[0], f"{self.uid}: position 0 has no prediction"


@dataclass(frozen=True, slots=True, kw_only=True)
class RolloutGroup:
    """The completions of one prompt with their rewards."""

    example: Example
    completions: list[Completion]
    texts: list[str]
    """The whole text of each completion."""
    answers: list[str]
    """The last turn of each completion, which is judged."""
    rewards: list[float]
    """0 where nothing judges."""
    reward_parts: list[dict[str, float]]
    """What the reward function returned beside the score, by name."""
    failures: list[str | None]
    """Why there is no score, where there is none: the reward function raised, hung or returned something other than a
    number, or the environment or agent failed."""
    has_baseline: bool = True
    """Whether there is a baseline to compare its rewards with; without one no completion is trained."""

    @property
    def failed(self) -> list[bool]:
        """Whether each completion's reward failed."""
        return [failure is not None for failure in self.failures]

    def prompt_ids(self, completion: Completion) -> list[int]:
        """Returns the prompt of one of the completions."""
        return self.example.prompt_ids if completion.prompt_ids is None else completion.prompt_ids


def _moved(instance: Any, device: torch.device) -> Any:
    tensors = {f.name: v for f in fields(instance) if isinstance(v := getattr(instance, f.name), Tensor)}
    return replace(instance, **{name: to_device(tensor, device) for name, tensor in tensors.items()})


PER_TOKEN_FIELDS = (
    "rollout_logprobs",
    "old_logprobs",
    "ref_logprobs",
    "advantages",
    "values",
    "returns",
    "importance_weights",
    "selected",
    "experts",
)
"""The optional per-token arrays that a Sample and a TokenBatch have in common."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenBatch:
    """One packed micro-batch of one data-parallel rank: sequences one after the other, no padding.

    Example: two sequences of 3 and 2 tokens:
        input_ids=[5, 9, 2, 4, 8]  position_ids=[0, 1, 2, 0, 1]  cu_seqlens=[0, 3, 5]  sample_index=[0, 1]
    """

    input_ids: Tensor
    """[T] int64."""
    position_ids: Tensor
    """[T] int64, from 0 in every sequence; [3, T] where a sequence has images: in time, height and width."""
    cu_seqlens: Tensor
    """[S + 1] int32, where each sequence starts, and T."""
    loss_mask: Tensor
    """[T] bool."""
    sample_index: list[int]
    """The index of each sequence in the list of samples that was packed. Empty in a batch that holds no sample
    (one masked token, so that collectives stay in step)."""
    uids: list[str] = field(default_factory=list)
    """The uid of each sequence's sample."""
    images: Images | None = None
    """The images of all sequences, in their order."""
    image_refs: list[ImageRef] = field(default_factory=list)
    """References to the images of all sequences until all are read. Ranks that share the batch each read their own:
    `images` then holds those alone."""
    rewards: Tensor | None = None
    """[S] float32, the reward of each sequence."""
    rollout_logprobs: Tensor | None = None
    old_logprobs: Tensor | None = None
    ref_logprobs: Tensor | None = None
    advantages: Tensor | None = None
    values: Tensor | None = None
    returns: Tensor | None = None
    importance_weights: Tensor | None = None
    selected: Tensor | None = None
    experts: Tensor | None = None

    def to(self, device: torch.device) -> Self:
        """Returns a copy with every tensor on `device` except those of the images, which no loss looks at."""
        moved: Self = _moved(self, device)
        return moved


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenOutputs:
    """What a forward pass gives for a TokenBatch: logprobs, entropy and divergence of a language model, or values of a
    critic or reward model. 0 where nothing is scored."""

    logprobs: Tensor | None = None
    """[T] float32, nats, temperature applied."""
    entropy: Tensor | None = None
    """[T] float32, nats, of the distribution that predicts the token; carries no gradient. None unless asked for."""
    divergence: Tensor | None = None
    """[T] float32, nats, of the distribution that predicts the token from a teacher's. None without a teacher."""
    values: Tensor | None = None
    """[T] float32."""

    def to(self, device: torch.device) -> Self:
        """Returns a copy with every tensor on `device`; it waits for copies to the host, but not for those to a
        device."""
        moved: Self = _moved(self, device)
        return moved


@dataclass(frozen=True, slots=True, kw_only=True)
class Denominators:
    """What losses are divided by: counts over one whole optimizer step, all ranks and micro-batches, on integers."""

    num_tokens: int
    """Trained tokens."""
    num_sequences: int
    """Sequences with at least one trained token."""


@dataclass(frozen=True, slots=True)
class MetricValue:
    """A partial result that merges exactly: how it is reduced is part of its type, never guessed from its name."""

    kind: Literal["sum", "mean", "max"]
    total: float | Tensor
    """The sum (sum, mean) or the largest value (max); a tensor is a scalar that stays on its device until reported."""
    count: float | Tensor = 1.0
    """What a mean is divided by."""

    def __post_init__(self) -> None:
        if self.kind not in ("sum", "mean", "max"):
            raise TypeError(
                "MetricValue is made by MetricValue.mean(total, count), MetricValue.sum(total) or "
                "MetricValue.max(total)"
            )

    @classmethod
    def sum(cls, total: float | Tensor) -> Self:
        return cls("sum", total)

    @classmethod
    def mean(cls, total: float | Tensor, count: float | Tensor) -> Self:
        """`total` is the sum of the values and `count` their number, so that merging weights every value equally."""
        return cls("mean", total, count)

    @classmethod
    def max(cls, total: float | Tensor) -> Self:
        return cls("max", total)

    def merge(self, other: Self) -> Self:
        """Returns the value over both parts."""
        assert self.kind == other.kind, (self.kind, other.kind)
        if self.kind == "max":
            if not isinstance(self.total, Tensor) and not isinstance(other.total, Tensor):
                larger = other.total if other.total > self.total or math.isnan(other.total) else self.total
                return replace(self, total=larger)  # a tensor would round it to float32
            pair = torch.as_tensor(self.total), torch.as_tensor(other.total)
            return replace(self, total=torch.maximum(*pair))  # stays on its device: no wait for each micro-batch
        return replace(self, total=self.total + other.total, count=self.count + other.count)

    def host(self) -> Self:
        """Returns the same value with plain floats: the one place where a metric waits for its device."""
        return replace(self, total=float(self.total), count=float(self.count))

    @property
    def is_empty(self) -> bool:
        """Whether it is a mean of no values, which is not reported."""
        return self.kind == "mean" and not float(self.count)

    def result(self) -> float:
        """Returns the final number; a mean over nothing is 0."""
        if self.kind != "mean":
            return float(self.total)
        count = float(self.count)
        return float(self.total) / count if count else 0.0


Metrics = dict[str, MetricValue]


def merge_metrics(parts: Iterable[Metrics]) -> Metrics:
    """Merges the partial metrics of micro-batches or ranks, name by name."""
    merged: Metrics = {}
    for part in parts:
        for name, value in part.items():
            merged[name] = merged[name].merge(value) if name in merged else value
    return merged


class WeightReceiver(Protocol):
    """The rollout side of a weight sync."""

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        """Copies the tensors into the served model; each is valid until the next one is taken. One that lies where it
        is served from was received there, and needs no copy. From this call until the commit the engine refuses to
        generate, for it holds weights of two versions."""

    def served_weights(self) -> Iterator[tuple[str, Tensor]]:
        """Yields the tensors the engine serves from, under their Hugging Face names. One that the engine takes but
        cannot read back is on the meta device, which tells its dtype and shape."""

    def served_checksums(self) -> Iterable[tuple[str, int | None]]:
        """Gives (name, xxh3) of each served tensor, hashed where the engine computes with it: what a receipt is made
        from. None for a tensor that cannot be read back."""

    def commit_weights(self, version: int) -> None:
        """Ends the sync: from here on completions carry `version`, and nothing computed with other weights (prefix
        caches) is used again."""


class Connections(Protocol):
    """Connections from every rank to every other, addressed by rank: the part of torch's process groups that needs no
    registration, such as a ProcessGroupGloo of its own."""

    def size(self) -> int:
        """Returns the number of ranks."""

    def send(self, tensors: list[Tensor], rank: int, tag: int) -> dist.Work:
        """Begins to send one tensor."""

    def recv(self, tensors: list[Tensor], rank: int, tag: int) -> dist.Work:
        """Begins to receive one tensor."""
