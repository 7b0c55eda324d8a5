"""SGLang as a rollout engine: each rank has its own server, on the loopback address, behind keys that only this rank
knows. Requests travel as JSON, weights as safetensors files; nothing is pickled between the two.

SGLang is never imported: its environment may have another release of torch than the trainer's.
"""

import shutil
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, Literal, Self

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor
from transformers import PreTrainedModel

from shardwise.checksum import checksums
from shardwise.config import ConfigError, ModelError, SglangRollout, TrainingError
from shardwise.config.rollout_engine import SGLANG_BANS_NO_TOKENS, SGLANG_TAKES_NO_MIN_P
from shardwise.ops import ModuleTrace
from shardwise.rollout.own_arguments import OwnArgument
from shardwise.rollout.readiness import Readiness
from shardwise.rollout.request_limits import RequestLimits
from shardwise.rollout.sampling import stream_key
from shardwise.rollout.sglang_server import SglangServer, check_sglang
from shardwise.rollout.skeleton import in_hub_names, load_skeleton, served_by
from shardwise.rollout.special_tokens import require_ends, require_words
from shardwise.rollout.stop_strings import Decode, first_stop
from shardwise.rollout.vision import requests_to_score
from shardwise.scratch import scratch_folder
from shardwise.types import Completion, GenerateRequest, Images

_BUCKET_BYTES = 1 << 30
"""Bytes of weights that this process collects before it writes them to a file."""


class SglangEngine:
    """A whole copy of the policy in a server, in the compute dtype."""

    def __init__(
        self,
        server: SglangServer,
        skeleton: PreTrainedModel,
        config: SglangRollout,
        *,
        stop_token_ids: Sequence[int],
        decode: Decode | None,
    ) -> None:
        """
        Args:
            skeleton: the same model in transformers, on the meta device; gives the names and shapes that weights come
                with.
            stop_token_ids, decode: as in `from_folder`.
        """
        self._server = server
        self._skeleton = skeleton
        self._weights_folder = Path(config.weights_folder)
        self._stop_ids = list(stop_token_ids)
        self._decode = decode
        self._limits = RequestLimits.of(skeleton.config)
        self._readiness = Readiness(server.name, sleep_level=config.sleep_level)

    @classmethod
    def from_folder(
        cls,
        folder: Path,
        config: SglangRollout,
        *,
        dtype: torch.dtype,
        max_rows: int,
        device: torch.device,
        stop_token_ids: Sequence[int] = (),
        bad_token_ids: Sequence[int] = (),
        decode: Decode | None = None,
    ) -> Self:
        """Starts a server for a model folder and waits until it can generate.

        Args:
            max_rows: sequences decoded at a time.
            stop_token_ids: tokens that end a completion, besides the model's own end-of-sequence tokens.
            decode: turns token ids into text; needed if requests have stop strings, for which SGLang loads the
                tokenizer too.
        Raises:
            ConfigError: SGLang is not installed, cannot do what is asked, or refuses an argument. ModelError:
                transformers cannot read the folder, or SGLang would end completions at tokens at which the folder's
                generation config does not.
        """
        if device.type == "cpu":
            raise ConfigError(
                "rollout.engine=sglang needs an accelerator: only in its deterministic mode does SGLang draw from a "
                "seed of each request, and it has none on a CPU; use rollout.engine=embedded"
            )
        check_sglang(config)
        skeleton = load_skeleton(folder, dtype)
        require_words(stop_token_ids, bad_token_ids, skeleton.config.get_text_config().vocab_size)
        if bad_token_ids:
            raise ConfigError(f"rollout.{SGLANG_BANS_NO_TOKENS}")
        _require_same_ends(folder, skeleton)
        _require_room(Path(config.weights_folder), sum(tensor.nbytes for _, tensor in served_by(skeleton)))
        own = {
            "model_path": OwnArgument(str(folder), "model.path"),
            "dtype": OwnArgument(str(dtype).removeprefix("torch."), "engine.param_dtype"),
            "max_running_requests": OwnArgument(max_rows, "rollout.max_concurrent_sequences"),
            "skip_tokenizer_init": OwnArgument(decode is None, "rollout.stop"),
            "enable_deterministic_inference": OwnArgument(True),
            "mem_fraction_static": OwnArgument(config.mem_fraction_static, "rollout.engine.mem_fraction_static"),
            "disable_radix_cache": OwnArgument(
                not config.enable_prefix_caching, "rollout.engine.enable_prefix_caching"
            ),
            "enable_memory_saver": OwnArgument(config.sleep_level > 0, "rollout.engine.sleep_level"),
            "enable_weights_cpu_backup": OwnArgument(config.sleep_level == 1, "rollout.engine.sleep_level"),
            "weight_version": OwnArgument("0"),
            "tp_size": OwnArgument(1),
            "base_gpu_id": OwnArgument(device.index or 0),
        }
        return cls(SglangServer(config, own), skeleton, config, stop_token_ids=stop_token_ids, decode=decode)

    def generate(
        self,
        requests: Sequence[GenerateRequest],
        *,
        on_finished: Callable[[int], None] | None = None,
        is_interrupted: Callable[[], bool] = lambda: False,
    ) -> list[list[Completion]]:
        """See RolloutEngine.generate. Ignores `is_interrupted`, and calls `on_finished` only when all completions are
        finished.

        Each completion is a separate request to SGLang, with its own seed; they share their prompt in SGLang's prefix
        cache.

        Raises:
            ConfigError: a request that SGLang cannot sample. TrainingError: the server failed, died or was stopped, or
                sleeping dropped its weights. DataError, RuntimeError: as RolloutEngine.generate.
        """
        self._readiness.require()
        self._limits.require(requests)
        for request in requests:
            _require_possible(request)
        prompts = [request.prompt_ids for request in requests for _ in range(request.num_completions)]
        params = [self._sampling(r, r.first_index + index) for r in requests for index in range(r.num_completions)]
        answers = iter(self._run(prompts, params))
        found = [[self._completion(r, next(answers)) for _ in range(r.num_completions)] for r in requests]
        if on_finished is not None:
            for place in range(len(found)):
                on_finished(place)
        return found

    def logprobs(
        self, sequences: Sequence[Sequence[int]], images: Sequence[Images | None] | None = None
    ) -> list[list[float]]:
        """See RolloutEngine.logprobs. Raises as `generate`."""
        self._readiness.require()
        self._limits.require_scorable(sequences)
        for prompt in requests_to_score(sequences, images):
            _require_possible(prompt)
        scoring = {"max_new_tokens": 0, "temperature": 0.0}
        answers = self._run(sequences, [scoring] * len(sequences), logprob_start_len=0)
        return [self._logprobs_of(answer["meta_info"]["input_token_logprobs"][1:]) for answer in answers]

    def trace(self) -> AbstractContextManager[ModuleTrace]:
        """Always raises ConfigError: the modules are in another process."""
        raise ConfigError("rollout.engine=sglang: the modules of a server cannot be seen; use embedded or vllm")

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        """Writes the tensors to files, under the names of the hub, and has the server load them when all have come,
        which drops its prefix cache. From the first tensor to the commit the engine refuses to generate."""
        served = dict(self.served_weights())
        missing = dict(served)
        with scratch_folder(self._weights_folder) as folder:
            _write_files(folder, in_hub_names(self._skeleton, self._readiness.arriving(weights, missing)))
            if len(missing) == len(served):
                return  # nothing came, nothing has changed
            if not missing:
                files = {"model_path": str(folder), "load_format": "safetensors", "flush_cache": True}
                self._server.administer("/update_weights_from_disk", files)
        self._readiness.arrived(missing)

    def served_weights(self) -> Iterator[tuple[str, Tensor]]:
        """Yields the names, shapes and dtypes that `load_weights` takes, as meta tensors. Values cannot be read back:
        SGLang fuses weights, and returns them only for a few families and as numbers in text."""
        return served_by(self._skeleton)

    def served_checksums(self) -> Iterator[tuple[str, int | None]]:
        """Yields None for every tensor, see `served_weights`."""
        return checksums(self.served_weights())

    def commit_weights(self, version: int) -> None:
        """Makes completions carry `version` from here on; the server reports it with each of them.

        Raises:
            RuntimeError: the weights are not complete.
        """
        self._readiness.commit(version)
        self._server.administer("/update_weight_version", {"new_version": str(version), "abort_all_requests": False})

    def sleep(self) -> None:
        """Gives device memory to the trainer until `wake`, as much as `sleep_level` says."""
        everything = {"tags": ["kv_cache", "weights"]}
        self._readiness.sleep(lambda: self._server.administer("/release_memory_occupation", everything))

    def wake(self, *parts: Literal["weights", "kv_cache"]) -> None:
        """Takes memory back: "weights" before a weight sync, "kv_cache" too before generation."""
        self._readiness.wake(parts, lambda tags: self._server.administer("/resume_memory_occupation", {"tags": tags}))

    @property
    def lacks_weights(self) -> bool:
        """See RolloutEngine.lacks_weights."""
        return self._readiness.lacks_weights

    def close(self) -> None:
        """Ends the server; the engine cannot be used again."""
        self._server.close()

    def _sampling(self, request: GenerateRequest, index: int) -> dict[str, Any]:
        limits = {"top_k": request.top_k or -1, "top_p": request.top_p} if request.temperature else {}
        return {
            "max_new_tokens": request.max_tokens,
            "temperature": request.temperature,
            **limits,
            "sampling_seed": stream_key(request.seed, request.uid, index),
            "stop": request.stop or None,
            "stop_token_ids": self._stop_ids or None,
        }

    def _completion(self, request: GenerateRequest, answer: dict[str, Any]) -> Completion:
        meta = answer["meta_info"]
        reason = meta["finish_reason"]
        if meta["weight_version"] != str(self._readiness.version):
            raise self._server.failure(
                f"sampled with version {meta['weight_version']}, {self._readiness.version} is due"
            )
        if reason["type"] == "abort":
            raise self._server.failure(f"broke off a completion of {request.uid}: {reason['message']}")
        entries = meta["output_token_logprobs"]
        if reason["type"] == "length" and len(entries) < request.max_tokens:
            raise self._server.failure(
                f"ended a completion of {request.uid} after {len(entries)} of max_tokens={request.max_tokens}: a "
                f"prompt of {len(request.prompt_ids)} tokens leaves no more; raise context_length in "
                "rollout.engine.args, or rollout.engine.mem_fraction_static"
            )
        # SGLang looks for a stop string in as many of the last tokens as the tokenizer writes it with, and one more.
        # The policy may write it with more.
        token_ids = [entry[1] for entry in entries]
        end = self._first_stop(request, token_ids)
        return Completion(
            token_ids=token_ids[:end],
            logprobs=self._logprobs_of(entries)[:end],
            finish_reason=reason["type"] if end is None else "stop",
            policy_version=self._readiness.version,
        )

    def _first_stop(self, request: GenerateRequest, token_ids: list[int]) -> int | None:
        if not request.stop:
            return None
        assert self._decode is not None, "stop strings need an engine that was given `decode`"
        return first_stop(token_ids, request.stop, self._decode)

    def _logprobs_of(self, entries: list[tuple[float | None, int, None]]) -> list[float]:
        logprobs = [entry[0] for entry in entries if entry[0] is not None]  # JSON has no NaN
        if len(logprobs) < len(entries):
            raise self._server.failure("gives no distribution for a token: weights or activations have overflowed")
        return logprobs

    def _run(
        self, prompts: Sequence[Sequence[int]], params: Sequence[dict[str, Any]], *, logprob_start_len: int = -1
    ) -> list[dict[str, Any]]:
        if not prompts:
            return []
        body = {
            "input_ids": [list(prompt) for prompt in prompts],
            "sampling_params": list(params),
            "return_logprob": True,
            "logprob_start_len": logprob_start_len,
        }
        return self._server.generate(body)


def _write_files(folder: Path, weights: Iterable[tuple[str, Tensor]]) -> None:
    """Writes tensors into safetensors files in a folder. Raises TrainingError if they cannot be written."""
    bucket: dict[str, Tensor] = {}
    num_bytes = num_files = 0

    def write() -> None:
        nonlocal bucket, num_bytes, num_files
        try:
            save_file(bucket, folder / f"{num_files:05}.safetensors")
        except (OSError, SafetensorError) as error:
            raise TrainingError(f"weights for SGLang cannot be written to {folder}: {error}") from error
        bucket, num_bytes, num_files = {}, 0, num_files + 1

    for name, tensor in weights:
        # A tensor is valid only until the next one is taken.
        bucket[name] = tensor.detach().to("cpu", copy=True).contiguous()
        num_bytes += tensor.nbytes
        if num_bytes >= _BUCKET_BYTES:
            write()
    if bucket:
        write()


def _require_possible(request: GenerateRequest) -> None:
    if request.images is not None:
        raise ConfigError(
            f"{request.uid} has images, which Shardwise does not pass on to SGLang; use rollout.engine=embedded or vllm"
        )
    if request.temperature and request.min_p:
        raise ConfigError(f"{request.uid} has min_p={request.min_p:g} {SGLANG_TAKES_NO_MIN_P}")


def _require_same_ends(folder: Path, skeleton: PreTrainedModel) -> None:
    """Raises ModelError if SGLang would end completions at other tokens than transformers: SGLang ends at the tokens of
    both config files, transformers only at those of the generation config if it has any."""
    ends = require_ends(skeleton.generation_config, skeleton.config)
    if skeleton.config.eos_token_id is None:
        return
    if others := sorted(set(require_ends(None, skeleton.config)) - set(ends)):
        raise ModelError(
            f"{folder}: config.json ends completions at token {others[0]}, generation_config.json does not; SGLang "
            "would end at both; make their eos_token_id the same"
        )


def _require_room(folder: Path, num_bytes: int) -> None:
    free = shutil.disk_usage(folder).free if folder.is_dir() else 0
    if free < num_bytes:
        raise ConfigError(
            f"rollout.engine.weights_folder={folder} has {free / 2**30:.1f} GiB free, and a weight sync takes "
            f"{num_bytes / 2**30:.1f} GiB; choose a folder with room, or give a container more shared memory"
        )
