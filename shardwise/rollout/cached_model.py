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
    """Computes hidden states and logits of tokens that follow those in a cache, and tells when a completion ends."""

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
        """Arguments and errors are those of EmbeddedEngine."""
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
        """How many sequences are decoded at a time."""
        self.device = device
        self.kernels = DecodeKernels() if compile_decode and device.type == "cpu" else None
        """Kernels for decode steps; None: torch's."""
        self.sight = CachedVisionTower.of(model, device)
        """The vision tower; None for a model that sees no images."""
        # Placeholder tokens of images have no meaning without an image, so the policy may not sample them.
        banned = [*bad_token_ids, *media_token_ids(model.config)]
        self.banned = torch.tensor(banned, dtype=torch.int64, device=device) if banned else None
        """[M] int64, tokens that are never drawn."""
        self.cache_size = self._measured()
        """Memory that the cache of a sequence takes."""

    def read(self, tokens: Tensor, images: Images | None = None) -> Tensor:
        """Hidden states of one whole sequence: tokens [L] on the host -> [L, D]. Raises as `hidden_states`."""
        return self._read(tokens, images)[0]

    def hidden_states(
        self, input_ids: Tensor, position_ids: Tensor, cache: KVCache, images: Sequence[Images] = ()
    ) -> Tensor:
        """Runs the model: input_ids [B, L], position_ids [B, L] or [3, B, L] -> hidden states [B, L, D].

        Args:
            images: those whose tokens are in input_ids, in order.

        Raises:
            ModelError: not every layer ran its attention, or its sequence mixer, through the cache.
        """
        # A single row would trigger a recompilation: torch.compile treats sizes of 1 as constants.
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
        """Returns the record of the experts chosen in the latest `hidden_states`; recording starts with the first call.

        Raises:
            ModelError: the model has no experts.
        """
        if self._record is None:
            self._record = ExpertRecord(self._model)
        return self._record

    def projection(self) -> Tensor:
        """Returns the projection that `logits` takes, [V, D]; valid until the weights change."""
        weight = self._model.get_output_embeddings().weight
        return repeated_projection(weight) if self.kernels is None else weight

    def logits(self, hidden: Tensor, projection: Tensor) -> Tensor:
        """Projects hidden [B, D] -> logits [B, V] float32, with the family's own transform applied."""
        project = project_float32 if self.kernels is None else self.kernels.project
        return self._transform.forward_(project(hidden, projection))

    def is_stopped(self, token_ids: list[int], stop: Sequence[str], *, begun: Sequence[int] = ()) -> bool:
        """Whether the last token ends the completion, or completes a stop string in its text, which may begin in
        `begun`, the tokens before these."""
        if token_ids[-1] in self._stop_ids:
            return True
        if not stop:
            return False
        assert self._decode is not None, "stop strings need an engine that was given `decode`"
        return brings_stop(token_ids, stop, self._decode, begun=begun)

    def _read(self, tokens: Tensor, images: Images | None = None) -> tuple[Tensor, KVCache]:
        """Reads one sequence: tokens [L] -> hidden states [L, D], and its cache. Raises as `hidden_states`."""
        length = len(tokens)
        cache = KVCache(num_rows=1, capacity_tokens=length, device=self.device)
        positions, shown = torch.arange(length, device=self.device)[None], [] if images is None else [images]
        blocks = None
        if self.sight is not None and shown:
            positions, _ = self.sight.places([tokens], shown)
            blocks = self.sight.blocks([tokens])
        cache.begin_prefill(torch.zeros(1, dtype=torch.int64, device=self.device), [length], blocks)
        return self.hidden_states(tokens.to(self.device)[None], positions, cache, shown)[0], cache

    @torch.inference_mode()
    def _measured(self) -> CacheSize:
        """Measures the cache size by running one token: families differ in the number and sizes of cached heads."""
        _, cache = self._read(torch.zeros(1, dtype=torch.int64))
        return cache.size
