"""vLLM as a rollout engine, in the process of a rank or one of its own: tokens in, tokens with logprobs out.

vLLM is imported when an engine is built, so that this file can be read without it.
"""

import gc
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, suppress
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Self

import torch
from torch import Tensor
from transformers import PreTrainedModel

from shardwise.checksum import checksums
from shardwise.config import ConfigError, TrainingError, VllmRollout
from shardwise.families import EXPERTS, takes_images
from shardwise.model_config import media_token_ids
from shardwise.ops import ModuleTrace, traced
from shardwise.region import Region
from shardwise.rollout.own_arguments import OwnArgument
from shardwise.rollout.readiness import Readiness
from shardwise.rollout.request_limits import RequestLimits
from shardwise.rollout.sampling import stream_key
from shardwise.rollout.skeleton import in_hub_names, load_skeleton, served_by
from shardwise.rollout.special_tokens import require_ends, require_words
from shardwise.rollout.stop_strings import first_stop
from shardwise.rollout.vision import requests_to_score
from shardwise.rollout.vllm_prompts import engine_input, image_arguments, shows_images
from shardwise.rollout.vllm_start import check_vllm, open_llm, own_arguments, said, window_arguments
from shardwise.rollout.vllm_weights import VllmAdapter, as_vllm_reads, in_names_of, itself, lora_arguments
from shardwise.rollout.weight_reads import WeightReads
from shardwise.types import Completion, FinishReason, GenerateRequest, Images

if TYPE_CHECKING:
    from vllm import LLM, RequestOutput, SamplingParams
    from vllm.inputs import EngineInput

_SEED_BITS = (1 << 63) - 1
_MOST_TOKENS_OF_A_CHARACTER = 4
"""UTF-8 takes up to 4 bytes, each of which may be a token."""
_FINISH_REASONS: dict[str | None, FinishReason] = {"stop": "stop", "length": "length", "abort": "interrupted"}


class VllmEngine:
    """A copy of the policy in the compute dtype: whole on one rank, or cut over neighbouring ranks. Those are called
    with the same arguments at the same time, and each returns all of the answer."""

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
        is_part: bool = False,
        adapter: VllmAdapter | None = None,
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
            is_part: this rank has a part of the model, and its neighbors have the others.
            adapter: all that syncs bring; None: the whole model.
        """
        self._llm = llm
        self._skeleton = skeleton
        self._stop_ids = list(stop_token_ids)
        self._bias = dict.fromkeys(bad_token_ids, float("-inf")) or None
        self._has_raw_logprobs = has_raw_logprobs
        self._has_workers = has_workers
        self._is_part = is_part
        self._needed: dict[str, Region] = {}
        self._adapter = adapter
        self._num_asked = 0
        """How many requests vLLM was sent so far, which numbers them."""
        self._limits = replace(
            RequestLimits.of(skeleton.config),
            context_tokens=llm.model_config.max_model_len,
            context_key="the vLLM engine (max_model_len of rollout.engine.args)",
        )
        self._scorable = replace(
            self._limits,
            context_tokens=llm.model_config.max_model_len - 1,
            context_key="a sequence that vLLM scores (max_model_len of rollout.engine.args, without room for one more)",
        )
        self._readiness = Readiness(f"the vLLM engine of {_rank_name()}", sleep_level=sleep_level)

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
        attach_adapter: Callable[[PreTrainedModel], Mapping[str, str]] | None = None,
    ) -> Self:
        """Loads a model folder.

        Args:
            max_rows: sequences decoded at a time.
            temperature: of the requests that are not greedy; logprobs are exact at this one.
            stop_token_ids: beside the model's own end-of-sequence tokens.
            has_stop_strings: requests may have stop strings.
            attach_adapter: puts the adapter that syncs will bring by itself into a model, and returns name in an
                adapter file -> name in its state_dict; None: they bring the whole model.
        Raises:
            ConfigError: vLLM is not installed, or refuses an argument or the adapter. ModelError: transformers cannot
                read the folder, or vLLM cannot take new weights for the model.
        """
        if config.sleep_level and device.type == "cpu":
            raise ConfigError(
                f"rollout.engine.sleep_level={config.sleep_level} needs a CUDA device; vLLM cannot give memory back on "
                "a CPU, set it to 0"
            )
        skeleton = load_skeleton(folder, dtype)
        text_config = skeleton.config.get_text_config()
        require_words(stop_token_ids, bad_token_ids, text_config.vocab_size)
        ends = require_ends(skeleton.generation_config, skeleton.config)
        is_composite = text_config is not skeleton.config  # vLLM prepares its processor then
        check_vllm(device, has_images=shows_images(skeleton))
        has_raw_logprobs = temperature == 1
        if config.may_ban_tokens(temperature):
            bad_token_ids = [*bad_token_ids, *media_token_ids(skeleton.config)]
        own = own_arguments(
            folder,
            config,
            dtype=dtype,
            max_rows=max_rows,
            has_raw_logprobs=has_raw_logprobs,
            needs_tokenizer=has_stop_strings or is_composite,
        )
        own |= image_arguments(folder, skeleton) | window_arguments(folder, skeleton.config)
        if attach_adapter is not None and takes_images(skeleton):
            raise ConfigError(
                "rollout.sync_adapter_only=true: vLLM would leave adapters of the vision tower out; set it to false, "
                "which syncs merged weights, or use rollout.engine=embedded"
            )
        if attach_adapter is not None and device.type == "cpu" and _has_fused_experts(skeleton):
            raise ConfigError(
                "rollout.sync_adapter_only=true: vLLM's CPU build has no kernel for fused experts beside adapters; set "
                "it to false, which syncs merged weights, or use rollout.engine=embedded"
            )
        in_file = {} if attach_adapter is None else attach_adapter(skeleton)
        if in_file:
            own |= {name: OwnArgument(value, "engine.lora") for name, value in lora_arguments(skeleton).items()}
        llm = open_llm(own, config.args, skeleton)
        is_whole = config.tensor_parallel_size == 1
        return cls(
            llm,
            skeleton,
            stop_token_ids=[*ends, *stop_token_ids],
            bad_token_ids=bad_token_ids,
            sleep_level=config.sleep_level,
            has_raw_logprobs=has_raw_logprobs,
            has_workers=config.has_workers,
            is_part=config.ranks_per_engine > 1,
            adapter=VllmAdapter(llm, skeleton, in_file, is_readable=is_whole) if in_file else None,
        )

    def generate(
        self,
        requests: Sequence[GenerateRequest],
        *,
        on_finished: Callable[[int], None] | None = None,
        is_interrupted: Callable[[], bool] = lambda: False,
    ) -> list[list[Completion]]:
        """See RolloutEngine.generate.

        Each completion is a request of its own to vLLM, with its own seed; they share their prompt's blocks in the
        prefix cache. One that goes on has another seed than the request that was interrupted.

        Raises:
            ConfigError: a request wants logprobs that vLLM does not give. TrainingError: vLLM failed, or sleeping
                dropped its weights. DataError, RuntimeError: as RolloutEngine.generate.
        """
        self._readiness.require()
        self._limits.require(requests)
        for request in requests:
            self._require_possible(request)
        inputs = [engine_input(request, self._skeleton) for request in requests]
        prompts = [given for given, r in zip(inputs, requests, strict=True) for _ in range(r.num_completions)]
        params = [self._sampling(r, r.first_index + index) for r in requests for index in range(r.num_completions)]
        request_of = [place for place, r in enumerate(requests) for _ in range(r.num_completions)]
        num_missing = [request.num_completions for request in requests]

        def count(place: int) -> None:
            num_missing[request_of[place]] -= 1
            if on_finished is not None and not num_missing[request_of[place]]:
                on_finished(request_of[place])

        outputs = iter(self._run(prompts, params, on_output=count, is_interrupted=is_interrupted))
        return [[self._completion(r, next(outputs)) for _ in range(r.num_completions)] for r in requests]

    def logprobs(
        self, sequences: Sequence[Sequence[int]], images: Sequence[Images | None] | None = None
    ) -> list[list[float]]:
        """Scores every token after the first, at temperature 1, in nats. Raises as `generate`."""
        from vllm import SamplingParams
        from vllm.sampling_params import RequestOutputKind

        self._readiness.require()
        self._scorable.require_scorable(sequences)
        scoring = SamplingParams(
            max_tokens=1,
            temperature=0.0,
            prompt_logprobs=0,
            detokenize=False,
            output_kind=RequestOutputKind.FINAL_ONLY,
        )
        prompts = [engine_input(prompt, self._skeleton) for prompt in requests_to_score(sequences, images)]
        scores = []
        for sequence, output in zip(sequences, self._run(prompts, [scoring] * len(prompts)), strict=True):
            assert output.prompt_logprobs is not None
            found = zip(sequence[1:], output.prompt_logprobs[1:], strict=True)
            scores.append([position[token].logprob for token, position in found if position is not None])
        return scores

    def trace(self) -> AbstractContextManager[ModuleTrace]:
        """See RolloutEngine.trace. vLLM has to run operation by operation (enforce_eager) and without its prefix cache
        for all of it to be seen."""
        from vllm.model_executor.layers import activation
        from vllm.model_executor.layers.linear import LinearBase

        (model,) = self._llm.apply_model(itself)
        layers = {layer for group in model.modules() if isinstance(group, torch.nn.ModuleList) for layer in group}

        # Between its modules vLLM keeps apart what transformers adds up: the residual stream, and what the last module
        # computed. Norms take both, layers return both. Its activations multiply too.
        def read_input(module: torch.nn.Module, arguments: Any) -> Any:
            return arguments if isinstance(module, LinearBase) else None

        def read_output(module: torch.nn.Module, value: Any) -> Any:
            if type(module).__module__ == activation.__name__:
                return None
            return sum(value) if module in layers and isinstance(value, tuple) else value

        return traced(in_names_of(self._skeleton, model), read_input=read_input, read_output=read_output)

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        """Copies the tensors over the served ones, by the names of the transformers class or of an adapter file, and
        drops the prefix cache. From the first one to the commit the engine refuses to generate; without all of them it
        stays so."""
        served = dict(self.served_weights())
        missing = dict(served)
        # vLLM keeps a tensor until its layer is whole, the sender only until the next one is taken.
        arriving = ((name, tensor.clone()) for name, tensor in self._readiness.arriving(weights, missing))
        if self._adapter is not None:
            tensors = {name: tensor.cpu() for name, tensor in arriving}
            if not missing:
                self._adapter.serve(tensors)
        elif self._needed:
            forms = dict(served_by(self._skeleton))
            reads = (WeightReads(name, forms[name].shape, tensor, self._needed[name]) for name, tensor in arriving)
            self._load((one.name, one.traced()) for one in reads)
        else:
            self._load(arriving)
        if len(missing) == len(served):
            return  # nothing came, nothing has changed
        if not self._llm.reset_prefix_cache():
            raise TrainingError(f"the vLLM engine of {_rank_name()} kept what it has computed with earlier weights")
        self._llm.llm_engine.reset_encoder_cache()  # of images
        self._readiness.arrived(missing)

    def served_weights(self) -> Iterator[tuple[str, Tensor]]:
        """Yields the names, shapes and dtypes that `load_weights` takes, as meta tensors: vLLM fuses weights and
        repacks them for its kernels, so they cannot be given back."""
        if self._adapter is not None:
            return iter(self._adapter.forms.items())
        whole = served_by(self._skeleton)
        return ((name, self._needed[name].of(form)) for name, form in whole) if self._needed else whole

    @property
    def is_part(self) -> bool:
        """Whether this rank computes with parts of the weights, which `needed_regions` tells."""
        return self._is_part and self._adapter is None

    def needed_regions(self) -> Mapping[str, Region]:
        """Returns what this rank computes with of each weight. Afterwards `load_weights` takes that alone.

        vLLM's loaders know it. They are given zeros on the first call, which note what is read of them, so that a sync
        has to follow.
        """
        if not self._needed:
            (model,) = self._llm.apply_model(itself)
            zero = torch.zeros((), device=next(model.parameters()).device)
            forms = dict(served_by(self._skeleton))
            zeros = {name: zero.to(form.dtype).expand(form.shape) for name, form in forms.items()}
            reads = [WeightReads(name, value.shape, value) for name, value in zeros.items()]
            self._load(self._readiness.arriving(((one.name, one.traced()) for one in reads), forms))
            self._needed = {one.name: one.region for one in reads}
        return self._needed

    def served_checksums(self) -> Iterator[tuple[str, int | None]]:
        """Of an adapter; None of a whole model: see `served_weights`. Raises TrainingError: vLLM computes with other
        values than were loaded."""
        return checksums(self.served_weights()) if self._adapter is None else self._adapter.checksums()

    def commit_weights(self, version: int) -> None:
        """Completes a weight sync: from here on completions carry `version`.

        Raises:
            RuntimeError: the weights are not whole.
        """
        self._readiness.commit(version)

    def close(self) -> None:
        """Gives all memory back; the engine cannot be used again."""
        from vllm.distributed.parallel_state import destroy_model_parallel

        self._llm.llm_engine.engine_core.engine_core.model_executor.shutdown()
        destroy_model_parallel()
        del self._llm
        gc.unfreeze()  # vLLM froze what it built

    def sleep(self) -> None:
        """Gives the device's memory to the trainer, as much as `sleep_level` says, until `wake`."""
        self._readiness.sleep(lambda: self._llm.sleep(level=self._readiness.sleep_level))

    def wake(self, *parts: Literal["weights", "kv_cache"]) -> None:
        """Takes memory back: for a weight sync that of the weights, before generation that of the cache too."""
        self._readiness.wake(parts, lambda tags: self._llm.wake_up(tags))

    @property
    def lacks_weights(self) -> bool:
        """See RolloutEngine.lacks_weights."""
        return self._readiness.lacks_weights

    def _load(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        renamed: Iterable[tuple[str, Tensor]] = as_vllm_reads(
            self._skeleton.config.model_type, in_hub_names(self._skeleton, weights)
        )
        if self._has_workers:  # other processes, which are sent copies
            renamed = list(renamed)
        self._llm.collective_rpc("load_checkpoint_weights", args=(renamed,))

    def _sampling(self, request: GenerateRequest, index: int) -> "SamplingParams":
        from vllm import SamplingParams
        from vllm.sampling_params import RequestOutputKind

        finds_stops = self._begins_inside_a_character(request)
        return SamplingParams(
            max_tokens=request.max_tokens,
            temperature=request.temperature,
            top_k=request.top_k,
            top_p=request.top_p,
            min_p=request.min_p,
            seed=_seed(request, index),
            stop=[] if finds_stops else request.stop,
            include_stop_str_in_output=True,
            stop_token_ids=self._stop_ids,
            ignore_eos=True,  # stop_token_ids has them
            logit_bias=self._bias,
            logprobs=0,
            flat_logprobs=True,
            detokenize=bool(request.stop) and not finds_stops,
            output_kind=RequestOutputKind.FINAL_ONLY,
        )

    def _completion(self, request: GenerateRequest, output: "RequestOutput") -> Completion:
        (completion,) = output.outputs
        if completion.finish_reason not in _FINISH_REASONS:
            raise TrainingError(
                f"the vLLM engine of {_rank_name()} ended a completion of {request.uid}: {completion.finish_reason}"
            )
        found = Completion(
            token_ids=list(completion.token_ids),
            logprobs=list(completion.logprobs.logprobs),
            finish_reason=_FINISH_REASONS[completion.finish_reason],
            policy_version=self._readiness.version,
        )
        if not request.stop or not (request.partial_token_ids or self._begins_inside_a_character(request)):
            return found
        # vLLM looks for stop strings in what it has sampled for this request alone, if at all.
        count = first_stop(found.token_ids, request.stop, self._decode, begun=request.partial_token_ids)
        if count is None:
            return found
        return replace(found, token_ids=found.token_ids[:count], logprobs=found.logprobs[:count], finish_reason="stop")

    def _begins_inside_a_character(self, request: GenerateRequest) -> bool:
        """Whether vLLM would look for stop strings in the prompt too: it takes all text for new once a character is
        whole that a prompt has left unfinished, as an interruption may."""
        last = [*request.prompt_ids, *request.partial_token_ids[-_MOST_TOKENS_OF_A_CHARACTER:]]
        tail = self._decode(last[-_MOST_TOKENS_OF_A_CHARACTER:]) if request.stop else ""
        return tail.endswith("\N{REPLACEMENT CHARACTER}")

    def _decode(self, token_ids: list[int]) -> str:
        text: str = self._llm.get_tokenizer().decode(token_ids, skip_special_tokens=True)
        return text

    def _run(
        self,
        prompts: Sequence["EngineInput"],
        params: Sequence["SamplingParams"],
        *,
        on_output: Callable[[int], None] = lambda place: None,
        is_interrupted: Callable[[], bool] = lambda: False,
    ) -> list["RequestOutput"]:
        """Tells `on_output` the place of each prompt that is done, and ends them all once `is_interrupted`."""
        adapter = None if self._adapter is None else self._adapter.request
        engine = self._llm.llm_engine
        outputs: list[RequestOutput] = []
        first, self._num_asked = self._num_asked, self._num_asked + len(prompts)
        try:
            for number, (prompt, own) in enumerate(zip(prompts, params, strict=True), first):
                engine.add_request(str(number), prompt, own, lora_request=adapter)
            while engine.has_unfinished_requests() and not is_interrupted():
                for output in engine.step():
                    if output.finished:
                        outputs.append(output)
                        on_output(int(output.request_id) - first)
            outputs += self._abort()
        except Exception as error:
            with suppress(Exception):  # it may be what has failed
                self._abort()
            raise TrainingError(f"the vLLM engine of {_rank_name()} failed while generating: {said(error)}") from error
        return sorted(outputs, key=lambda output: int(output.request_id))

    def _abort(self) -> list["RequestOutput"]:
        """Ends what is being computed. Returns what it has come to, which an engine without queues keeps to itself."""
        from vllm.v1.engine import FinishReason

        engine, core = self._llm.llm_engine, self._llm.llm_engine.engine_core.engine_core
        states = dict(engine.output_processor.request_states)
        outputs = [state.make_request_output([], None, FinishReason.ABORT, None) for state in states.values()]
        engine.abort_request(list(states), internal=True)
        while core.scheduler.has_requests() or core.batch_queue:  # its cache is held until these are done
            engine.step()
        return outputs

    def _require_possible(self, request: GenerateRequest) -> None:
        limits = self._llm.model_config.multimodal_config
        if request.images is not None and limits is not None and limits.get_limit_per_prompt("image") == 0:
            raise ConfigError(
                f"{request.uid} has images, and rollout.engine.args.limit_mm_per_prompt has image=0; raise it, or "
                "leave it out"
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


def _has_fused_experts(model: PreTrainedModel) -> bool:
    fused = (name.split(".") for name, parameter in model.named_parameters() if parameter.dim() == 3)
    return any(EXPERTS in names for names in fused)


def _seed(request: GenerateRequest, index: int) -> int:
    """vLLM's generators begin with a request: the place of its first token tells its draws from those of a request
    before it, which an interruption or a turn of an environment's has ended."""
    start = len(request.prompt_ids) + len(request.partial_token_ids)
    return stream_key(request.seed, f"{request.uid} from token {start}", index) & _SEED_BITS


def _rank_name() -> str:
    return f"rank {os.environ.get('RANK', '0')}"
