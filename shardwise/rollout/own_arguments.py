"""Arguments of vLLM and SGLang that Shardwise sets itself, so that rollout.engine.args may not."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from shardwise.config import ConfigError


@dataclass(frozen=True, slots=True)
class OwnArgument:
    """An argument that Shardwise sets.

    Example: `{"max_num_seqs": OwnArgument(128, "rollout.max_concurrent_sequences")}`
    """

    value: Any
    key: str | None = None
    """Key of our config that the value comes from; None: no key changes it."""


def require_left_alone(args: Iterable[str], own: Mapping[str, OwnArgument]) -> None:
    """Raises ConfigError if one of `args` is ours, whether spelled with underscores or with dashes."""
    for name in args:
        if (ours := own.get(name.replace("-", "_"))) is None:
            continue
        hint = "no key changes it; remove it" if ours.key is None else f"from {ours.key}; set that, and remove this"
        raise ConfigError(f"rollout.engine.args.{name}: Shardwise sets this itself, {hint}")
