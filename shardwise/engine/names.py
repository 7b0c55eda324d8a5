"""Names of modules and parameters, as users know them from transformers."""

import difflib

from torch import nn

_WRAPPER = "_checkpoint_wrapped_module."
"""What torch's activation wrappers insert into the paths of the modules they wrap."""
NUM_SHOWN = 5


def plain_name(path: str) -> str:
    """The path of a module or parameter without the wrappers around it."""
    return path.replace(_WRAPPER, "")


def is_within(name: str, module: str) -> bool:
    """Whether a parameter or module is `module` or lies in it: `model.layers.1` does not hold `model.layers.10`."""
    return name == module or name.startswith(f"{module}.")


def closest_modules(model: nn.Module, given: str) -> str:
    """For errors: real module names that look like `given`."""
    paths = [plain_name(path) for path, _ in model.named_modules() if path]
    near = difflib.get_close_matches(given, paths, n=NUM_SHOWN, cutoff=0.4) or paths[:NUM_SHOWN]
    return f"its modules have names such as {', '.join(near)}"


def closest_classes(model: nn.Module, given: str) -> str:
    """For errors: class names of the model's modules with parameters, the most similar first."""
    names = sorted({type(module).__name__ for module in model.modules() if next(module.parameters(), None) is not None})
    near = difflib.get_close_matches(given, names, n=len(names), cutoff=0.0)
    return f"its modules are of {', '.join(near)}"
