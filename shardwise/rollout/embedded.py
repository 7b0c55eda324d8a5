"""Shardwise's own generation: continuous batching over a Hugging Face model, in the process of a rank.

One prefill serves all completions of a prompt; finished rows leave the batch at once and waiting prompts enter it.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, Literal, Self

import torch
from torch import Tensor
from transformers import AutoModel, AutoModelForCausalLM, AutoModelForImageTextToText, PreTrainedModel

from shardwise.checksum import checksums
from shardwise.config import ConfigError, ModelError, in_one_line
from shardwise.console import listed
from shardwise.families import (
    UNREGISTERED_ATTENTION,
    attention_of,
    avoid_unaligned,
    defer_choices,
    families_of,
    hand_on_keywords,
    language_model_class,
    packed_tokens_limit,
    rotary_limit,
    unproven_reason,
    unsupported_reason,
    wrapper_reason,
)
from shardwise.memfd import SharedTensors
from shardwise.model_config import read_model_config, require_generates
from shardwise.ops import (
    HostCopies,
    ModuleTrace,
    plain_name,
    traced,
)
from shardwise.rollout.cached_model import CachedModel
from shardwise.rollout.decoding import Decoding, Row, longest
from shardwise.rollout.kv_cache import (
    CACHED_ATTENTION,
    cache_mixers,
    register_cached_attention,
)
from shardwise.rollout.request_limits import RequestLimits
from shardwise.rollout.stop_strings import Decode
from shardwise.rollout.vision import image_spans, requests_to_score
from shardwise.types import Completion, GenerateRequest, Images

_SCORED_AT_A_TIME = 256
"""Tokens of a sequence whose logits are in memory at the same time."""


class EmbeddedEngine:
    """A whole copy of the policy on one rank, in the compute dtype."""

    def __init__(
        self,
        model: PreTrainedModel,
        *,
        max_rows: int,
        device: torch.device,
        stop_token_ids: Sequence[int] = (),
        bad_token_ids: Sequence[int] = (),
        decode: Decode | None = None,
        compile_decode: bool = False,
        adapter: Mapping[str, str] | None = None,
        sleep_level: Literal[0, 1] = 0,
    ) -> None:
        """
        Args:
            max_rows: sequences decoded at a time; bounds the key/value cache.
            stop_token_ids: tokens that end a completion, besides the model's own end-of-sequence tokens.
            bad_token_ids: tokens that are never drawn.
            decode: turns token ids into text, for requests with stop strings.
            compile_decode: torch.compile the forward pass of a decode step; on a CPU also use `DecodeKernels`.
            adapter: everything that weight syncs bring: name in the sync -> name in the model's state_dict. None: syncs
                bring the whole model, under its own names.
            sleep_level: where the weights are while the engine sleeps: 0 on the device, 1 in host memory.

        Raises:
            ConfigError: compile_decode on a CPU without a C++ compiler; tokens outside the vocabulary.
            ModelError: as in `CachedModel.hidden_states`.
        """
        self._model = model
        self._cached = CachedModel(
            model,
            max_rows=max_rows,
            device=device,
            stop_token_ids=stop_token_ids,
            bad_token_ids=bad_token_ids,
            decode=decode,
            compile_decode=compile_decode,
        )
        text_config = model.config.get_text_config()
        self._rotary_limit = rotary_limit(text_config)
        self._max_tokens = packed_tokens_limit(text_config)
        self._limits = RequestLimits.of(model.config)
        self._adapter = adapter
        self._sleep_level = sleep_level
        self._on_host = HostCopies()
        self._version: int | None = 0

    @classmethod
    def from_folder(
        cls,
        folder: Path,
        *,
        dtype: torch.dtype,
        max_rows: int,
        device: torch.device,
        attach_adapter: Callable[[PreTrainedModel], Mapping[str, str]] | None = None,
        allow_unproven: bool = False,
        sleep_level: Literal[0, 1] = 0,
        **options: Any,
    ) -> Self:
        """Loads a model folder; `options` are those of `__init__`, whose `adapter` is what `attach_adapter` returns.

        Raises:
            ConfigError: the family is not proven to be computed by cached attention, and allow_unproven is False;
                sleep_level on a CPU.
            ModelError: transformers cannot load the folder or would make up weights; cached attention cannot compute
                the model.
        """
        if sleep_level and device.type == "cpu":
            raise ConfigError(
                f"rollout.engine.sleep_level={sleep_level} moves weights from an accelerator to host memory, and on a "
                "CPU they are there anyway; set it to 0"
            )
        model, missing = _load_model(folder, dtype)
        if reason := unsupported_reason(model):
            raise ModelError(f"{folder}: {reason}")
        families = families_of(model.config, AutoModelForCausalLM, AutoModelForImageTextToText)
        if not allow_unproven and (reason := unproven_reason(families, ["embedded"], "rollout.engine.allow_unproven")):
            raise ConfigError(f"{folder}: {reason}")
        if missing:
            count = "1 tensor is" if len(missing) == 1 else f"{len(missing)} tensors are"
            raise ModelError(
                f"{folder} does not fit its config.json: {count} missing ({listed(missing)}). Take the config.json "
                "that was saved with these weights"
            )
        avoid_unaligned(model, dtype)
        adapter = None if attach_adapter is None else attach_adapter(model)
        cache_mixers(model)
        defer_choices(model)
        hand_on_keywords(model)
        return cls(
            model.to(device).eval(),
            adapter=adapter,
            max_rows=max_rows,
            device=device,
            sleep_level=sleep_level,
            **options,
        )

    @torch.inference_mode()
    def generate(
        self,
        requests: Sequence[GenerateRequest],
        *,
        on_finished: Callable[[int], None] | None = None,
        is_interrupted: Callable[[], bool] = lambda: False,
    ) -> list[list[Completion]]:
        """Completes every request; see RolloutEngine.generate.

        Raises:
            ConfigError: the device has no room for the cache of the sequences that are decoded at a time.
            ModelError: a prompt and its completion would be so long that they change how others are computed; images
                do not fit their prompt, or the model takes none.
            DataError, RuntimeError: as RolloutEngine.generate.
        """
        version = self._require_version()
        if self._rotary_limit and (reason := self._rotary_limit.refusal(longest(requests))):
            raise ModelError(f"{type(self._model).__name__}: a prompt and its max_tokens: {reason}")
        if self._max_tokens is not None and longest(requests) > self._max_tokens:
            raise ModelError(
                f"{type(self._model).__name__}: a prompt and its max_tokens are {longest(requests)} tokens, more than "
                f"the {self._max_tokens} up to which attn_temperature_tuning does not depend on a token's place; lower "
                "rollout.max_response_tokens or data.max_prompt_tokens"
            )
        self._limits.require(requests)
        for request in requests:
            image_spans(request, self._model)
        results = [
            [Row(number, index).completion("interrupted", version) for index in range(request.num_completions)]
            for number, request in enumerate(requests)
        ]
        num_missing = [request.num_completions for request in requests]
        decoding = Decoding(self._cached, requests)
        while decoding.is_unfinished() and not is_interrupted():
            for row, finish_reason in decoding.advance():
                results[row.request][row.index] = row.completion(finish_reason, version)
                num_missing[row.request] -= 1
                if on_finished is not None and not num_missing[row.request]:
                    on_finished(row.request)
        for row in decoding.rows:
            results[row.request][row.index] = row.completion("interrupted", version)
        return results

    @torch.inference_mode()
    def logprobs(
        self, sequences: Sequence[Sequence[int]], images: Sequence[Images | None] | None = None
    ) -> list[list[float]]:
        """See RolloutEngine.logprobs. Scores one sequence at a time, because probes ask for few."""
        self._require_version()
        self._limits.require_scorable(sequences)
        projection, results = self._cached.projection(), []
        for prompt in requests_to_score(sequences, images):
            image_spans(prompt, self._model)
            tokens = torch.tensor(prompt.prompt_ids)
            hidden = self._cached.read(tokens, prompt.images)[:-1].split(_SCORED_AT_A_TIME)
            targets = tokens[1:].to(self._cached.device).split(_SCORED_AT_A_TIME)
            scored = [
                self._cached.logits(rows, projection).log_softmax(-1).gather(-1, wanted[:, None])[:, 0]
                for rows, wanted in zip(hidden, targets, strict=True)
            ]
            results.append(torch.cat(scored).tolist())
        return results

    def trace(self) -> AbstractContextManager[ModuleTrace]:
        """See RolloutEngine.trace."""
        return traced((plain_name(path), module) for path, module in self._model.named_modules())

    def share_weights(self) -> SharedTensors:
        """Moves the weights, if they are on the host, into memory that the other end of a weight sync may write to."""
        return SharedTensors(self._model.parameters())

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        """Copies the tensors, by Hugging Face name, over the served ones."""
        served = dict(self.served_weights())
        self._version = None
        with torch.no_grad():
            for name, tensor in weights:
                if not tensor.is_set_to(served[name]):
                    served[name].copy_(tensor)
                del tensor  # else it would stay while the next one is gathered

    def served_weights(self) -> Iterator[tuple[str, Tensor]]:
        """Yields the weights that the next token is computed with, without tied copies; of a model with an adapter only
        the adapter."""
        if self._adapter is not None:
            state = self._model.state_dict()
            return ((in_file, state[name]) for in_file, name in self._adapter.items())
        tied = set(self._model.get_expanded_tied_weights_keys())
        return ((name, tensor) for name, tensor in self._model.state_dict().items() if name not in tied)

    def served_checksums(self) -> Iterator[tuple[str, int | None]]:
        """See WeightReceiver.served_checksums."""
        return checksums(self.served_weights())

    def commit_weights(self, version: int) -> None:
        """Lets completions carry `version` from here on. There is no prefix cache to drop: none outlives `generate`."""
        self._version = version

    def sleep(self) -> None:
        """Moves the weights to the host if `sleep_level` is 1; the cache is gone since `generate` returned."""
        if self._sleep_level:
            self._on_host.take(self._model.parameters())

    def wake(self, *parts: Literal["weights", "kv_cache"]) -> None:
        """Moves the weights back."""
        if "weights" in parts:
            self._on_host.give_back()

    @property
    def lacks_weights(self) -> bool:
        """False: none are dropped."""
        return False

    def close(self) -> None:
        """Does nothing: everything is freed with the engine itself."""

    def _require_version(self) -> int:
        assert not self._on_host, "the engine sleeps"
        if self._version is None:
            raise RuntimeError("the rollout engine holds a part of new weights; sync them whole before it generates")
        return self._version


def _load_model(folder: Path, dtype: torch.dtype) -> tuple[PreTrainedModel, list[str]]:
    """Returns the model with cached attention, and the names of the weights that the folder lacks. Raises ModelError if
    transformers cannot load the folder, or not with this attention."""
    register_cached_attention()
    config = read_model_config(folder)
    require_generates(folder, config)
    model_class = language_model_class(config, AutoModelForCausalLM, AutoModelForImageTextToText, AutoModel)
    if reason := wrapper_reason(config, model_class):
        raise ModelError(f"{folder}: {reason}")
    try:
        model, report = model_class.from_pretrained(
            folder,
            dtype=dtype,
            attn_implementation=attention_of(config, CACHED_ATTENTION),
            output_loading_info=True,
        )
    except Exception as error:  # whatever a value in config.json leads to, or damaged weights
        if isinstance(error, ValueError) and "AutoModelForImageTextToText" in str(error):
            reason = f"{folder}: transformers has no model for CausalLM of the family {config.model_type}"
        elif error.args == (CACHED_ATTENTION,):  # some families look the name up in their own table
            reason = f"{folder}: {config.model_type} is not supported: it {UNREGISTERED_ATTENTION}"
        else:
            reason = f"{folder} cannot be loaded for generation: {in_one_line(error)}"
        raise ModelError(reason) from None
    return model, sorted(report["missing_keys"])
