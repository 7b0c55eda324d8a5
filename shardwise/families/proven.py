"""Which model families have been proven to compute correctly, and for which features: the record that `make models`
writes.

`unsupported_reason` refuses what is known to be computed wrong; this says what has been compared with transformers.
"""

import json
from collections.abc import Collection, Iterable, Mapping
from functools import cache
from importlib.metadata import version
from importlib.resources import files
from typing import Any

RECORD_NAME = "proven.json"
PROVEN = "proven"

CHECKS: Mapping[str, str] = {
    "packing": "training on packed sequences",
    "fsdp2": "sharding over ranks",
    "export": "export to the Hugging Face layout",
    "ulysses": "sequence parallelism (ulysses_size above 1)",
    "expert_parallel": "expert parallelism (ep_size above 1)",
    "checkpointing_full": "activation checkpointing of whole layers",
    "checkpointing_selective": "activation checkpointing by operation",
    "lora": "LoRA",
    "lora_experts": "LoRA on fused experts",
    "qlora": "LoRA on a base in 4 bits",
    "token_values": "a value head",
    "sequence_scores": "a score head",
    "embedded": "the embedded rollout engine",
}
"""The checks that a family is proven by, each with the feature that it covers, in words."""


@cache
def _record() -> Mapping[str, Any]:
    record: dict[str, Any] = json.loads((files(__package__) / RECORD_NAME).read_text(encoding="utf-8"))
    return record


def proven_record() -> Mapping[str, Mapping[str, str]]:
    """model_type -> check -> PROVEN, or why it is not. Families refused as a whole only have the check packing."""
    families: Mapping[str, Mapping[str, str]] = _record()["families"]
    return families


def proven_release() -> str:
    """Returns the release of transformers that everything in the record was proven with."""
    release: str = _record()["transformers"]
    return release


@cache
def _installed_release() -> str:
    return version("transformers")


def other_release() -> str | None:
    """Returns a note that another release of transformers is installed than the proven one, which may be why a proven
    family fails. None if the first two numbers of the releases agree."""
    installed = _installed_release()
    if installed.split(".")[:2] == proven_release().split(".")[:2]:
        return None
    return f"model families are proven with transformers {proven_release()}, and {installed} is installed"


def with_release(reason: str) -> str:
    """Appends the note of `other_release`, if there is one, to a reason why a model is refused."""
    return reason if (note := other_release()) is None else f"{reason} ({note})"


def is_proven(model_type: str, check: str) -> bool:
    """Whether a family has passed a check, one of CHECKS."""
    return proven_record().get(model_type, {}).get(check) == PROVEN


def unproven_reason(families: Iterable[str], asked: Collection[str], key: str) -> str | None:
    """Says what has not been proven for families.

    Args:
        families: what `families_of` returns for a config.
        asked: the keys of CHECKS that a run needs.
        key: the config key that allows unproven families.
    Returns:
        A sentence that names the first family with something missing, what has been proven for it instead, and `key`;
        None if everything is proven.
    """
    reasons = (_unproven_reason(family, asked, key) for family in families)
    return next((reason for reason in reasons if reason is not None), None)


def _unproven_reason(model_type: str, asked: Collection[str], key: str) -> str | None:
    missing = [CHECKS[check] for check in asked if not is_proven(model_type, check)]
    if not missing:
        return None
    proven = [words for check, words in CHECKS.items() if is_proven(model_type, check)]
    return with_release(
        f"{', '.join(missing)}: not proven for the family {model_type}, of which "
        f"{', '.join(proven) or 'nothing'} is proven (docs/models.md has all families); choose another, or set "
        f"{key}=true to try it unproven"
    )
