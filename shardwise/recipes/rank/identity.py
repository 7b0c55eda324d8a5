"""Checks what every rank of a job must have in common: the code, functions of the user's own among it, the config and
the models. If torchrun starts ranks on several hosts, each host has its own."""

import json
import socket
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch.distributed as dist
import xxhash

from shardwise.config import ConfigError, Custom, RecipeConfig, leaves, parts_of
from shardwise.console import listed
from shardwise.controller.process_group import Rank
from shardwise.recipes.checkpointing.fingerprints import Fingerprints, model_fingerprints
from shardwise.rewards import source_file

_PACKAGE = Path(__file__).parents[2]
_FILES = "the files of "
"""How the names of what one rank of each host has alone begin."""

Identity = dict[str, Any]
"""Name in errors -> value: `{"the code of shardwise": "5d41...", "trainer.seed": 0, "the files of model.path":
[["config.json", "9c56..."]]}`."""


def identity_of(config: RecipeConfig | None, rank: Rank) -> Identity:
    """Returns the identity of this rank. One rank of each host fingerprints model files, as `fingerprints` does, and
    files of custom functions.

    Raises:
        ConfigError, ModelError: as `fingerprints`.
    """
    identity: Identity = {f"the release of {name}": version(name) for name in ("torch", "transformers")}
    identity["the code of shardwise"] = _code_digest()
    if config is not None:
        identity |= leaves(config.model_dump(mode="json"))
        if rank.local_rank == 0:
            fingerprints = model_fingerprints(config) | _function_fingerprints(config)
            identity |= {f"{_FILES}{key}": files for key, files in fingerprints.items()}
    return identity


def require_same_identity(rank: Rank, store: dist.Store, identity: Identity) -> None:
    """Waits for all ranks, which compare themselves with rank 0. Raises ConfigError: on every rank, if one differs."""
    if rank.rank == 0:
        store.set("identity", json.dumps([socket.gethostname(), identity]))
        others = range(1, rank.world_size)
        store.set("differs", next(filter(None, (store.get(f"differs/{other}").decode() for other in others)), ""))
    else:
        host, expected = json.loads(store.get("identity"))
        store.set(f"differs/{rank.rank}", _difference(rank, identity, host, expected))
    if said := store.get("differs").decode():
        error = ConfigError(said)
        error.is_shared = True
        raise error


def _difference(rank: Rank, identity: Identity, host: str, expected: Identity) -> str:
    """Says in words what differs; empty if nothing does. Files count where both have looked at them, and a key that one
    has alone as null for the other: it is in a group, or in an entry of a list, that the other's config lacks."""
    own: Identity = json.loads(json.dumps(identity))
    names = [name for name in expected | own if not name.startswith(_FILES) or (name in own and name in expected)]
    different = [name for name in names if own.get(name) != expected.get(name)]
    if not different:
        return ""
    shown = listed([_shown(name, own.get(name), expected.get(name)) for name in different])
    return (
        f"rank {rank.rank} on {socket.gethostname()} differs from rank 0 on {host} in {shown}; start the same "
        "command with the same code, packages and model folders on every host"
    )


def _shown(name: str, own: Any, other: Any) -> str:
    if isinstance(own or other, list | dict) or name.startswith("the code"):
        return name
    return f"{name} ({own} and {other})"


def _function_fingerprints(config: RecipeConfig) -> Fingerprints:
    """Fingerprints the file of each custom function, as far as it is on this machine."""
    files = {key: source_file(chosen.function) for key, chosen in parts_of(config, Custom)}
    return {key: [[file.name, xxhash.xxh3_64_hexdigest(file.read_bytes())]] for key, file in files.items() if file}


def _code_digest() -> str:
    digest = xxhash.xxh3_64()
    for path in sorted(_PACKAGE.rglob("*.py")):
        digest.update(path.relative_to(_PACKAGE).as_posix().encode())
        digest.update(path.read_bytes())
    return digest.hexdigest()
