"""Opens the models that a recipe starts from, and checks that the parts fit before any of them is built."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from transformers import PreTrainedTokenizerBase

from shardwise.config import ConfigError, EmbeddedRollout, ModelConfig, ModelError, SamplingConfig, SglangRollout
from shardwise.console import warn
from shardwise.data import UnusableProcessor, Vision, WordsAlone, check_vocabulary, load_tokenizer
from shardwise.data.chat import turn_end_id
from shardwise.engine import resolve_folder
from shardwise.families import context_of, rotary_limit
from shardwise.model_config import end_of_sequence_ids, media_token_ids, read_generation_config, read_model_config
from shardwise.recipes.checkpointing.checkpoints import latest_hf_folder, reading
from shardwise.recipes.checkpointing.manifest import verify_weights


@dataclass(frozen=True, slots=True)
class Context:
    """The longest sequence that a model was made for, and up to which it computes the same in every batch."""

    num_tokens: int | None
    """None if its config sets no limit."""
    source: str
    """The key that sets the limit, and its file."""

    @classmethod
    def of(cls, folder: Path) -> "Context":
        """Reads the limit of a model folder. Raises ModelError: config.json cannot be used."""
        text_config = read_model_config(folder).get_text_config()
        context, key = context_of(text_config)
        rotary = rotary_limit(text_config)
        if rotary is not None and (context is None or rotary.num_tokens < context):
            context, key = rotary.num_tokens, f"{rotary.key}, as {rotary.reason},"
        return cls(context, f"{key} in {folder / 'config.json'}")

    def require(self, said: str, num_tokens: int) -> None:
        """Raises ConfigError if sequences of `num_tokens`, in words `said`, are longer than the limit."""
        if self.num_tokens is not None and num_tokens > self.num_tokens:
            raise ConfigError(
                f"{said} tokens, more than the {self.num_tokens} of the model's context ({self.source}); lower it, "
                "or extend the context in config.json where the model's card says how (rope_parameters of type yarn)"
            )


@dataclass(frozen=True, slots=True)
class OpenedModel:
    """A model folder whose tokenizer fits it."""

    config: ModelConfig
    """The given config, with `path` resolved to a local folder."""
    folder: Path
    tokenizer: PreTrainedTokenizerBase
    vision: Vision | None
    """How the model is shown images; None if it sees none."""
    context: Context

    @property
    def turn_end_id(self) -> int | None:
        """The token that ends turns in the chat template, if the model's configs do not let it end completions; else
        None. Raises ModelError: generation_config.json cannot be used."""
        config = read_model_config(self.folder).get_text_config()
        end = turn_end_id(self.tokenizer)
        return None if end in end_of_sequence_ids(read_generation_config(self.folder), config) else end

    @property
    def media_token_ids(self) -> list[int]:
        """The tokens that stand for parts of images and videos, which no text may spell."""
        return media_token_ids(read_model_config(self.folder))

    def vision_in(self, rollout: SamplingConfig) -> Vision | None:
        """Returns how images are shown to the model where it also samples; None if the rollout cannot show any."""
        if rollout.environment is not None:
            return None
        match rollout.engine, self.vision:
            case SglangRollout(), _:
                return None
            case (EmbeddedRollout(), _) | (_, WordsAlone() | Vision(finds_positions=True) | None):
                return self.vision
        family = read_model_config(self.folder).model_type
        return WordsAlone(
            f"rollout.engine=vllm is not given images of the family {family}; use rollout.engine=embedded"
        )

    def warn_of_refused_images(self) -> None:
        """Warns if the image processor cannot be used, before rows are read."""
        if isinstance(self.vision, UnusableProcessor):
            warn(f"{self.vision.reason}; until then rows with images are refused")

    def require_visible_stops(self, rollout: SamplingConfig) -> None:
        """Raises ConfigError: a stop string has a special token, which the text of completions lacks."""
        for text in rollout.stop:
            token_ids = self.tokenizer.encode(text, add_special_tokens=False)
            if self.tokenizer.decode(token_ids) == self.tokenizer.decode(token_ids, skip_special_tokens=True):
                continue
            is_token = len(token_ids) == 1
            raise ConfigError(
                f"rollout.stop has {text!r}, which {'is' if is_token else 'has'} a special token, and completions are "
                "read without these, so it would never be found; "
                + (f"use rollout.stop_token_ids=[{token_ids[0]}]" if is_token else "give its ordinary text alone")
            )

    def warn_of_endless_turns(self, rollout: SamplingConfig) -> None:
        """Warns if the token that ends turns in the chat template does not end completions."""
        if (end := self.turn_end_id) is not None and end not in rollout.stop_token_ids:
            warn(
                f"the chat template ends turns with {self.tokenizer.convert_ids_to_tokens(end)}, which by "
                f"generation_config.json and config.json of {self.folder} ends no completion; "
                f"rollout.stop_token_ids=[{end}] makes it"
            )


def open_model(config: ModelConfig) -> OpenedModel:
    """Finds the folder (of a run: its newest checkpoint; of a hub name: downloaded), loads the tokenizer and checks
    that the two fit.

    Raises:
        ModelError: no such model, no weights, no tokenizer, token ids that the model has no embedding for, or weights
            that have changed since a run saved them, or that the run removes meanwhile.
    """
    path = latest_hf_folder(config.path)
    with reading(Path(path)):
        folder = resolve_folder(path)
        resolved = config.model_copy(update={"path": str(folder)})
        text_config = read_model_config(folder).get_text_config()
        tokenizer = load_tokenizer(resolved)
        check_vocabulary(tokenizer, text_config.vocab_size)
        vision = Vision.load(folder, tokenizer)
        verify_weights(folder)
        return OpenedModel(resolved, folder, tokenizer, vision, Context.of(folder))


def open_companion(config: ModelConfig, main: OpenedModel, *, said: str, num_tokens: int) -> OpenedModel:
    """Opens a model that works on the tokens of another one: a critic or a teacher.

    Args:
        said, num_tokens: as for `Context.require`.
    Raises:
        ModelError: as `open_model`, or a token id does not mean the same to both. ConfigError: its context is shorter.
    """
    opened = open_model(config)
    require_same_words(main, opened)
    opened.context.require(said, num_tokens)
    return opened


def shared_vision(vision: Vision | None, companions: Mapping[str, OpenedModel]) -> Vision | None:
    """Returns how rows show images to a model and to others that work on its tokens: as `vision` does if it shows all
    of them the same, else in no way, with the reason in the error for a row that has one.

    Args:
        vision: how the model itself is shown images.
        companions: config key -> one of the others.
    """
    for key, other in companions.items():
        if vision is not None and (reason := vision.difference(other.vision)):
            return WordsAlone(f"{key} ({other.folder}) {reason}")
    return vision


def require_same_words(main: OpenedModel, other: OpenedModel) -> None:
    """Raises ModelError unless every token id means the same to both models."""
    words, others = main.tokenizer.get_vocab(), other.tokenizer.get_vocab()
    different = sorted(set(words.items()) ^ set(others.items()))
    if different:
        word, token_id = different[0]
        owner = main.folder if words.get(word) == token_id else other.folder
        raise ModelError(
            f"the tokenizers of {main.folder} and {other.folder} differ in {len(different)} entries (only that of "
            f"{owner} has {word!r} as token {token_id}), and both models read the same tokens; use models of one family"
        )
