"""A model whose attention reads and writes a key/value cache: what generation computes with.

Shapes: B rows, L tokens, D hidden size, V vocabulary.
"""

from collections.abc import Sequence

import torch
from torch import Tensor
from transformers import PreTrainedModel

from shardwise.config import ModelError
from shardwise.families import attention_layers, backbone
from shardwise.model_config import media_token_ids
from shardwise.ops import LogitTransform, project_float32, repeated_projection
from shardwise.rollout.decode_kernels import DecodeKernels
from shardwise.rollout.expert_record import ExpertRecord
from shardwise.rollout.kv_cache import CachedMixer, CacheSize, KVCache
from shardwise.rollout.special_tokens import require_ends, require_words
from shardwise.rollout.stop_strings import Decode, brings_stop
from shardwise.rollout.vision import CachedVisionTower
from shardwise.types import Images


class CachedModel:
    """Hidden states and logits of tokens behind those in a cache, and which tokens end a completion."""

    def __init__(
        self,
        model: PreTrainedModel,
        *,
        max_rows: int,
        device: torch.device,
        stop_token_ids: Sequence[int],
        bad_token_ids: Sequence[int],
        decode: Decode | None,
        compile_decode: bool,
    ) -> None:
        """Arguments and errors as of EmbeddedEngine."""
        self._model = model
        self._decode_forward = torch.compile(backbone(model), dynamic=True) if compile_decode else backbone(model)
        text_config = model.config.get_text_config()
        require_words(stop_token_ids, bad_token_ids, text_config.vocab_size)
        self._transform = LogitTransform.from_config(text_config)
        self._attention_layers = attention_layers(text_config)
        self._mixer_layers = [part.layer for part in model.modules() if isinstance(part, CachedMixer)]
        ends = require_ends(model.generation_config, model.config)
        self._stop_ids = frozenset([*ends, *stop_token_ids])
        self._decode = decode
        self._record: ExpertRecord | None = None
        self.max_rows = max_rows
        """Sequences decoded at a time."""
        self.device = device
        self.kernels = DecodeKernels() if compile_decode and device.type == "cpu" else None
        """Of decode steps; None: torch's."""
        self.sight = CachedVisionTower.of(model, device)
        """None of a model that sees no images."""
        # What stands for a part of an image has no meaning without one: the policy may not say it.
        banned = [*bad_token_ids, *media_token_ids(model.config)]
        self.banned = torch.tensor(banned, dtype=torch.int64, device=device) if banned else None
        """[M] int64, tokens that are never drawn."""
        self.cache_size = self._measured()
        """Of what a sequence is decoded from."""

    def read(self, tokens: Tensor, images: Images | None = None) -> Tensor:
        """Of one whole sequence, tokens [L] on the host -> [L, D]. Raises as `hidden_states`."""
        return self._read(tokens, images)[0]

    def hidden_states(
        self, input_ids: Tensor, position_ids: Tensor, cache: KVCache, images: Sequence[Images] = ()
    ) -> Tensor:
        """input_ids [B, L], position_ids [B, L] or [3, B, L] -> [B, L, D].

        Args:
            images: those that input_ids have tokens for, in their order.

        Raises:
            ModelError: not every layer computed its attention, or what it carries on, through the cache.
        """
        # A single row would be compiled anew: torch.compile takes sizes of 1 for constants.
        forward = self._decode_forward if input_ids.shape[1] == 1 < len(input_ids) else backbone(self._model)
        if self._record is not None:
            self._record.begin()
        with cache.in_use():
            seen = {} if self.sight is None else self.sight.look(images)
            output = forward(input_ids=input_ids, position_ids=position_ids, use_cache=False, kv_cache=cache, **seen)
        for what, seen_layers, layers in (
            ("attention", cache.layers_seen, self._attention_layers),
            ("sequence mixer", cache.mixers_seen, self._mixer_layers),
        ):
            if seen_layers != layers:
                raise ModelError(
                    f"{type(self._model).__name__} is not supported: its {len(layers)} layers called the cached {what} "
                    f"{len(seen_layers)} times instead of once each, in order"
                )
        return output.last_hidden_state

    def expert_record(self) -> ExpertRecord:
        """Of the newest `hidden_states`, from the first call of this on.

        Raises:
            ModelError: the model has no experts.
        """
        if self._record is None:
            self._record = ExpertRecord(self._model)
        return self._record

    def projection(self) -> Tensor:
        """[V, D], what `logits` takes; valid until the weights change."""
        weight = self._model.get_output_embeddings().weight
        return repeated_projection(weight) if self.kernels is None else weight

    def logits(self, hidden: Tensor, projection: Tensor) -> Tensor:
        """hidden [B, D] -> [B, V] float32, transformed as the family asks."""
        project = project_float32 if self.kernels is None else self.kernels.project
        return self._transform.forward_(project(hidden, projection))

    def is_stopped(self, token_ids: list[int], stop: Sequence[str]) -> bool:
        """Whether the last token ends a completion, or has brought a stop string into its text."""
        if token_ids[-1] in self._stop_ids:
            return True
        if not stop:
            return False
        assert self._decode is not None, "stop strings need an engine that was given `decode`"
        return brings_stop(token_ids, stop, self._decode)

    def _read(self, tokens: Tensor, images: Images | None = None) -> tuple[Tensor, KVCache]:
        """tokens [L] of one sequence -> [L, D], and what is cached of it. Raises as `hidden_states`."""
        length = len(tokens)
        cache = KVCache(num_rows=1, capacity_tokens=length, device=self.device)
        cache.begin_prefill(torch.zeros(1, dtype=torch.int64, device=self.device), [length])
        positions, shown = torch.arange(length, device=self.device)[None], [] if images is None else [images]
        if self.sight is not None and shown:
            positions, _ = self.sight.places([tokens], shown)
        return self.hidden_states(tokens.to(self.device)[None], positions, cache, shown)[0], cache

    @torch.inference_mode()
    def _measured(self) -> CacheSize:
        """The cache size, measured by running one token: families differ in the number and sizes of cached heads."""
        _, cache = self._read(torch.zeros(1, dtype=torch.int64))
        return cache.size
