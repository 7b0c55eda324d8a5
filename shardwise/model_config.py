"""Reads config.json and generation_config.json of a model folder, and says what is wrong with those that transformers
cannot use."""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import transformers
from transformers import CONFIG_MAPPING, AutoConfig, GenerationConfig, PreTrainedConfig

from shardwise.config import ModelError, UserError, in_one_line

GENERATION_CONFIG_NAME = "generation_config.json"
_MOST_QUOTED = 300
"""The most characters to quote of a message of transformers; some messages list every class it has."""


def read_model_config(folder: Path, **options: Any) -> PreTrainedConfig:
    """Reads config.json as transformers' class for it. Code that it names (`auto_map`) is dropped and never run.

    Args:
        options: values that replace those in the file.
    Raises:
        ModelError: the file is missing, damaged or for a model that transformers does not know, or has a wrong value.
    """
    if not (folder / "config.json").is_file():  # else transformers looks for it on the hub
        raise ModelError(f"{folder / 'config.json'} does not exist; a model folder needs one")
    try:
        written, _ = PreTrainedConfig.get_config_dict(folder)
        _require_known(folder, written)
        config: PreTrainedConfig = AutoConfig.from_pretrained(folder, trust_remote_code=False, **options)
    except UserError:
        raise
    except Exception as error:  # whatever a value in the file leads to
        raise ModelError(f"{folder / 'config.json'} is not a model config: {_reason(error, folder)}") from None
    vars(config).pop("auto_map", None)
    if not isinstance(text := config.get_text_config(), PreTrainedConfig):
        raise ModelError(
            f"{folder / 'config.json'} is not a model config: {text} in it belongs to another model than one of type "
            f"{config.model_type}; remove it"
        )
    return config


def _require_known(folder: Path, written: dict[str, Any]) -> None:
    """Raises ModelError: transformers has no class for the model, and would ask for an option that runs code from its
    folder."""
    if (model_type := written.get("model_type")) in CONFIG_MAPPING:
        return
    release = f"transformers {transformers.__version__}"
    what = "it names no model_type" if model_type is None else f"{release} has no model_type={model_type}"
    code = ", and code beside weights (auto_map) is never run" if "auto_map" in written else ""
    raise ModelError(
        f"{folder / 'config.json'} is not a model config: {what}{code}; correct it, install a release of transformers "
        "that has it, or register its classes in Python (AutoConfig.register, AutoModelForCausalLM.register) before "
        "you build a TrainEngine"
    )


def require_generates(folder: Path, config: PreTrainedConfig) -> None:
    """Raises ModelError: the folder holds a reward model or a critic. With tied embeddings nothing else would show it:
    all weights of a language model are there."""
    for name in config.architectures or ():
        if name.endswith(("ForSequenceClassification", "ForTokenClassification")):
            raise ModelError(
                f"{folder} holds a {name}, a reward model or critic, which has no distribution of tokens; give the "
                "language model that it was trained from, or one that was trained with it"
            )


def require_no_critic(folder: Path, config: PreTrainedConfig) -> None:
    """Raises ModelError: the folder holds a critic, whose head no reward model has."""
    for name in config.architectures or ():
        if name.endswith("ForTokenClassification"):
            raise ModelError(
                f"{folder} holds a {name}, a critic, which values every token where a reward model scores a whole "
                "sequence; give a reward model, or the language model to train one from"
            )


def read_generation_config(folder: Path, *, is_saved_again: bool = True) -> GenerationConfig | None:
    """Reads generation_config.json; None where there is none.

    Args:
        is_saved_again: then it has to be free of keys that act on nothing, such as a temperature without do_sample,
            which many folders have.
    Raises:
        ModelError: transformers cannot read it, or would refuse to save it.
    """
    path = folder / GENERATION_CONFIG_NAME
    if not path.is_file():
        return None
    try:
        config: GenerationConfig = GenerationConfig.from_pretrained(folder)
        if is_saved_again:
            config.validate(strict=True)
    except Exception as error:  # whatever a value in the file leads to
        claim = "cannot be read, or not be saved again as it is" if is_saved_again else "cannot be read"
        said = _quoted(f"{type(error).__name__}: {error}")
        raise ModelError(f"{path} {claim}; correct it: {said}") from None
    return config


def end_of_sequence_ids(generation: GenerationConfig | None, config: PreTrainedConfig) -> list[int]:
    """Returns the tokens that end completions: those of the generation config or, where it has none, of the config."""
    ids = None if generation is None else generation.eos_token_id
    ids = config.eos_token_id if ids is None else ids
    return [] if ids is None else [ids] if isinstance(ids, int) else list(ids)


def media_token_ids(config: PreTrainedConfig) -> list[int]:
    """Returns the tokens that stand for parts of images, videos and sounds, and mean nothing without them; none for a
    model that reads only text.

    Tokens beyond the vocabulary are left out: a config that names none has those of the family's first model.
    """
    ids = (getattr(config, name, None) for name in ("image_token_id", "video_token_id", "audio_token_id"))
    return [token_id for token_id in ids if token_id is not None and token_id < config.get_text_config().vocab_size]


@contextmanager
def blaming_config(folder: Path, purpose: str) -> Iterator[None]:
    """Blames config.json for every error in its block, in which a model is built from that file and nothing else.

    Args:
        purpose: what the model is for, such as CausalLM.
    Raises:
        ModelError: the block raised.
    """
    try:
        yield
    except UserError:
        raise
    except Exception as error:
        raise ModelError(
            f"{folder} cannot be built as a model for {purpose}; look into its config.json. {_reason(error, folder)}"
        ) from None


def _reason(error: Exception, folder: Path) -> str:
    """Puts an error in words. A KeyError is about a value that a table of transformers lacks: the file tells which
    field has it."""
    if isinstance(error, KeyError):
        written = json.loads((folder / "config.json").read_text(encoding="utf-8"))
        for section in (written, *(value for value in written.values() if isinstance(value, dict))):
            for name, value in section.items():
                if error.args == (value,):
                    return f"{name}={value} is not known to transformers"
    return _quoted(f"{type(error).__name__}: {error}")


def _quoted(error: object) -> str:
    """Returns the beginning of the error's text, in one line."""
    text = in_one_line(error)
    return text if len(text) <= _MOST_QUOTED else f"{text[:_MOST_QUOTED]}..."
