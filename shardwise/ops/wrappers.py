"""Names of modules inside wrappers: torch's ActivationWrapper, which checkpointing and sequence mixers use, and peft's
around a module that it trains a copy of."""

import re

_WRAPPED = "_checkpoint_wrapped_module"
"""What torch's ActivationWrapper inserts into the paths of the modules and parameters within."""


_COPIES = re.compile(r"\.(original_module|modules_to_save\.[^.]+)(?=\.|$)")
"""What peft inserts into the paths of a module in modules_to_save and of its copy."""


def plain_name(path: str) -> str:
    """The path of a module or parameter without the wrappers around it."""
    return ".".join(part for part in path.split(".") if part != _WRAPPED)


def name_without_copies(path: str) -> str:
    """The path that a module had before peft made a copy of it, which is also the copy's.

    Example: `mlp.modules_to_save.default.gate` -> `mlp.gate`
    """
    return _COPIES.sub("", path)
