"""Opens what a recipe starts from, and checks that the parts fit before any of them is built."""

from dataclasses import dataclass
from pathlib import Path

from transformers import AutoConfig, PreTrainedTokenizerBase

from shardwise.config import ConfigError, EngineConfig, ModelConfig, ModelError, TrainerConfig
from shardwise.controller.base import WorkerGroup
from shardwise.data import check_vocabulary, load_tokenizer
from shardwise.engine import resolve_folder
from shardwise.recipes.checkpoints import latest_hf_folder
from shardwise.types import Metrics, MetricValue


@dataclass(frozen=True, slots=True)
class OpenedModel:
    """A model folder whose tokenizer fits it."""

    config: ModelConfig
    """As it was given, with `path` resolved to a local folder."""
    folder: Path
    tokenizer: PreTrainedTokenizerBase
    context_tokens: int | None
    """The longest sequence the model was made for; None where its config sets no limit."""

    def require_context(self, keys: str, num_tokens: int) -> None:
        """Raises ConfigError if sequences of `num_tokens`, set by the config `keys`, exceed the model's context."""
        if self.context_tokens is not None and num_tokens > self.context_tokens:
            raise ConfigError(
                f"{keys} = {num_tokens} tokens, more than the {self.context_tokens} of the model's context "
                f"(max_position_embeddings in {self.folder / 'config.json'}); lower it"
            )


def open_model(config: ModelConfig) -> OpenedModel:
    """Finds the folder (of a run: its newest checkpoint; of a hub name: downloaded), loads the tokenizer and compares
    the two.

    Raises:
        ModelError: no such model, no weights, no tokenizer, or token ids that the model has no embedding for.
    """
    folder = resolve_folder(latest_hf_folder(config.path))
    resolved = config.model_copy(update={"path": str(folder)})
    tokenizer = load_tokenizer(resolved)
    try:
        text_config = AutoConfig.from_pretrained(folder).get_text_config()
    except (ValueError, OSError, KeyError) as error:
        raise ModelError(f"{folder / 'config.json'} is not a model config: {error}") from None
    check_vocabulary(tokenizer, text_config.vocab_size)
    return OpenedModel(resolved, folder, tokenizer, getattr(text_config, "max_position_embeddings", None))


@dataclass(frozen=True, slots=True)
class BuiltPolicy:
    """The trained policy on all ranks."""

    size: str
    """For people: how many parameters it has, and how many of them are trained."""
    metrics: Metrics
    """load/bytes_read: the bytes of weights that the rank with the most of them read from disk."""


def build_policy(
    group: WorkerGroup, model: ModelConfig, engine: EngineConfig, trainer: TrainerConfig, total_steps: int
) -> BuiltPolicy:
    """Builds the policy's training engine on every rank; `total_steps` are optimizer steps of the whole run."""
    built = group.call(
        "build_policy",
        model.model_dump_json(),
        engine.model_dump_json(),
        trainer.optimizer_config().model_dump_json(),
        total_steps,
        trainer.seed,
    )
    num_parameters, num_trained, _ = built[0]
    size = f"{num_parameters / 1e6:,.1f}M parameters"
    if num_trained < num_parameters:
        size += f" ({num_trained / 1e6:,.2f}M trained)"
    return BuiltPolicy(size, {"load/bytes_read": MetricValue.max(max(num_bytes for *_, num_bytes in built))})
