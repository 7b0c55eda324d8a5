"""The JSON files in which a model folder says what its processor does."""

import json
from pathlib import Path
from typing import Any

from shardwise.config import ModelError
from shardwise.data.sources import describe_type


def read_keys(path: Path, key: str | None = None) -> dict[str, Any]:
    """Reads such a file; returns what it says, or says under `key`: nothing where there is no file.

    Raises:
        ModelError: it cannot be read.
    """
    if not path.is_file():
        return {}
    try:
        tree = json.loads(path.read_text(encoding="utf-8"))
        if not isinstance(tree, dict):
            raise ValueError(f"it holds {describe_type(tree)} instead of keys")
    except (OSError, ValueError) as error:
        raise ModelError(f"{path} cannot be read: {error}; download or copy it again") from None
    return tree if key is None else tree.get(key) or {}
