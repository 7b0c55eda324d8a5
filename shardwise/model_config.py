"""The config.json of a model folder, and what to say of one that transformers cannot use."""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from transformers import AutoConfig, PreTrainedConfig

from shardwise.config import ModelError, UserError


def read_model_config(folder: Path, **options: Any) -> PreTrainedConfig:
    """What config.json says, as transformers' class for it; code of its own is never run.

    Args:
        options: what takes the place of values in the file.
    Raises:
        ModelError: it is missing, damaged or of a model that transformers does not know, or a value in it is wrong.
    """
    try:
        config: PreTrainedConfig = AutoConfig.from_pretrained(folder, trust_remote_code=False, **options)
    except Exception as error:  # whatever a value in the file leads to
        raise ModelError(f"{folder / 'config.json'} is not a model config: {_reason(error, folder)}") from None
    if not isinstance(text := config.get_text_config(), PreTrainedConfig):
        raise ModelError(
            f"{folder / 'config.json'} is not a model config: {text} in it belongs to another model than one of type "
            f"{config.model_type}; remove it"
        )
    return config


@contextmanager
def blaming_config(folder: Path, purpose: str) -> Iterator[None]:
    """Inside it a model is built from config.json and nothing else, so all that goes wrong is due to that file.

    Args:
        purpose: what the model is for: CausalLM.
    Raises:
        ModelError: it went wrong.
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
    """In words. A KeyError is of a value that a table of transformers lacks: which field has it stands in the file."""
    if isinstance(error, KeyError):
        written = json.loads((folder / "config.json").read_text(encoding="utf-8"))
        for section in (written, *(value for value in written.values() if isinstance(value, dict))):
            for name, value in section.items():
                if error.args == (value,):
                    return f"{name}={value} is not known to transformers"
    return " ".join(f"{type(error).__name__}: {error}".split())
