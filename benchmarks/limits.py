"""What a training step must compute and what it should hold, and what a decode step must read and compute: the formulas
that measurements are compared with.

Symbols: L layers, D hidden, q query and k key/value width, F feed-forward, V vocabulary, s length of a document.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from transformers import Qwen3Config

from shardwise.config import EngineConfig
from shardwise.engine.tiled_mlp import DEFAULT_NUM_SHARDS

EAGER_FACTOR = 1.34
"""What transformers' layers keep for backward over what fused norms, rotary embedding and SwiGLU would: measured on
Qwen3 in float32 norms (55.2 against 41.1 bytes for each token and hidden element)."""
CHUNK_BYTES = 2**30
"""Logits that exist at a time, with their copy in the compute dtype, at most."""


@dataclass(frozen=True, slots=True)
class ModelShape:
    """A Qwen3."""

    hidden: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    ffn: int
    tied: bool
    vocab: int = 151_936

    def config(self) -> Qwen3Config:
        return Qwen3Config(
            vocab_size=self.vocab,
            hidden_size=self.hidden,
            intermediate_size=self.ffn,
            num_hidden_layers=self.layers,
            num_attention_heads=self.heads,
            num_key_value_heads=self.kv_heads,
            head_dim=self.head_dim,
            max_position_embeddings=2**17,
            rope_parameters={"rope_type": "default", "rope_theta": 1e6},
            tie_word_embeddings=self.tied,
            bos_token_id=None,
            eos_token_id=1,
            pad_token_id=0,
        )

    @property
    def query_width(self) -> int:
        return self.heads * self.head_dim

    @property
    def key_width(self) -> int:
        return self.kv_heads * self.head_dim

    @property
    def layer_matmul_parameters(self) -> int:
        """D (2q + 2k) + 3 D F."""
        return self.hidden * (2 * self.query_width + 2 * self.key_width) + 3 * self.hidden * self.ffn

    @property
    def num_parameters(self) -> int:
        norms = self.layers * (2 * self.hidden + 2 * self.head_dim) + self.hidden
        return self.layers * self.layer_matmul_parameters + self._embedding_parameters + norms

    @property
    def _embedding_parameters(self) -> int:
        return self.vocab * self.hidden * (1 if self.tied else 2)

    def forward_flops(self, lengths: Sequence[int], num_scored: int) -> int:
        """Of documents of these lengths under a causal mask; the output projection is applied to `num_scored` states.

        2 FLOP for each matmul parameter and token; 2 q s (s + 1) a layer for both products of attention.
        """
        matmuls = 2 * self.layers * self.layer_matmul_parameters * sum(lengths)
        attention = 2 * self.query_width * self.layers * sum(length * (length + 1) for length in lengths)
        return matmuls + attention + 2 * self.vocab * self.hidden * num_scored

    def train_flops(self, lengths: Sequence[int], num_scored: int) -> int:
        """Forward and backward. What checkpointing computes again is no work of the model and not counted."""
        return 3 * self.forward_flops(lengths, num_scored)

    @property
    def cache_bytes(self) -> int:
        """Keys and values of one token in bfloat16."""
        return 2 * 2 * self.layers * self.key_width

    def decode_bytes(self, num_rows: int, context: int) -> int:
        """What one decode step in bfloat16 has to read: every matrix once, and the cache of `context` tokens of each
        row. Norms, and the few rows of the embedding, are left out."""
        weights = 2 * (self.layers * self.layer_matmul_parameters + self.vocab * self.hidden)
        return weights + num_rows * context * self.cache_bytes

    def decode_flops(self, num_rows: int, context: int) -> int:
        """Of one decode step, whose tokens see `context` tokens each, themselves included."""
        matmuls = 2 * (self.layers * self.layer_matmul_parameters + self.vocab * self.hidden)
        return num_rows * (matmuls + 4 * self.query_width * self.layers * context)

    def decode_seconds(
        self, num_rows: int, contexts: Sequence[int], *, bytes_per_second: float, flops_per_second: float
    ) -> float:
        """The least time for a decode step at each of these contexts."""
        return sum(
            max(
                self.decode_bytes(num_rows, context) / bytes_per_second,
                self.decode_flops(num_rows, context) / flops_per_second,
            )
            for context in contexts
        )

    def layer_activation_bytes(self, *, tiled: bool = False) -> float:
        """What one layer in bfloat16 keeps for backward, for each token; tiled: its MLP for one slice of tokens."""
        mlp = 8 * self.ffn / (DEFAULT_NUM_SHARDS if tiled else 1)
        attention = 4 * self.query_width + 4 * self.key_width + 2 * (self.query_width + self.key_width) + 4 * self.heads
        return EAGER_FACTOR * (8 * self.hidden + attention + mlp)

    def kept_bytes(self, config: EngineConfig) -> float:
        """What one layer keeps between its forward and its backward, for each token."""
        whole = self.layer_activation_bytes(tiled=config.apply_tiled_mlp)
        host = config.activation_offload
        if config.activation_checkpointing == "none":
            return whole
        its_input = 0.0 if host else 2 * self.hidden
        if config.activation_checkpointing == "full":
            return its_input
        if config.checkpoint_every_layers is not None:
            share = 1 / config.checkpoint_every_layers
            return share * its_input + (1 - share) * whole
        attention = 2 * self.query_width + 4 * self.heads
        if config.compile_layers:
            return its_input + attention
        # Of the matrix products the second, fourth and sixth: key, output and up.
        return its_input + attention + 2 * (self.key_width + self.hidden + self.ffn)

    def estimated_bytes(self, config: EngineConfig, num_tokens: int) -> float:
        """Peak memory of a training step on one device."""
        masters = 4 if config.master_dtype == "float32" else 2
        states = (2 * masters + 8) * self.num_parameters  # weights, gradients, two float32 moments
        root = (2 + 2 + 4) * self._embedding_parameters  # gathered, its gradient, and that in the dtype of reduction
        units = (2 * 2 + 2 + 4) * self.layer_matmul_parameters  # two gathered layers, and one gradient likewise
        kept = self.layers * self.kept_bytes(config) * num_tokens
        working = 2 * self.layer_activation_bytes(tiled=config.apply_tiled_mlp) * num_tokens  # of one layer's backward
        return states + root + units + kept + working + CHUNK_BYTES


QWEN3 = {
    "tiny": ModelShape(hidden=32, layers=2, heads=4, kv_heads=2, head_dim=8, ffn=48, tied=True, vocab=512),
    "0.6b": ModelShape(hidden=1024, layers=28, heads=16, kv_heads=8, head_dim=128, ffn=3072, tied=True),
    "4b": ModelShape(hidden=2560, layers=36, heads=32, kv_heads=8, head_dim=128, ffn=9728, tied=True),
    "8b": ModelShape(hidden=4096, layers=36, heads=32, kv_heads=8, head_dim=128, ffn=12288, tied=False),
}
