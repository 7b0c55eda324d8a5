"""Modules that stand around others: torch's ActivationWrapper, which checkpointing and sequence mixers use."""

_WRAPPED = "_checkpoint_wrapped_module"
"""What it inserts into the paths of the modules and parameters within."""


def plain_name(path: str) -> str:
    """The path of a module or parameter without the wrappers around it."""
    return ".".join(part for part in path.split(".") if part != _WRAPPED)
