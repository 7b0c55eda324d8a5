"""Names of modules and parameters, as users know them from transformers."""

import difflib

from torch import nn

from shardwise.ops import plain_name

CONTAINERS = (nn.ModuleList, nn.ModuleDict)
"""Modules without a forward: nothing can be gathered for them."""
_ADAPTED = ".base_layer"
"""What peft inserts into the paths of the modules it puts adapters around."""
NUM_SHOWN = 5


def outermost(path: str) -> str:
    """The path that a module had before adapters were put around it; it now leads to the outermost of them."""
    return path.replace(_ADAPTED, "")


def is_within(name: str, module: str) -> bool:
    """Whether a parameter or module is `module` or lies in it: `model.layers.1` does not hold `model.layers.10`."""
    return name == module or name.startswith(f"{module}.")


def has_parameters(module: nn.Module) -> bool:
    return next(module.parameters(), None) is not None


def tied_elsewhere(model: nn.Module, given: str) -> str | None:
    """For errors: a sentence about a module or parameter that has no weight of its own, because the model has it under
    another name; None if that is not so."""
    names = {id(parameter): plain_name(name) for name, parameter in model.named_parameters()}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        own = names[id(parameter)]
        if is_within(plain_name(name), given) and not is_within(own, given):
            return f"{given} has no weight of its own, it is {own}; name that"
    return None


def closest_modules(model: nn.Module, given: str) -> str:
    """For errors: names of modules with parameters that look like `given`."""
    parts = {plain_name(path): part for path, part in model.named_modules() if path}
    paths = [path for path, part in parts.items() if has_parameters(part) and not isinstance(part, CONTAINERS)]
    near = difflib.get_close_matches(given, paths, n=NUM_SHOWN, cutoff=0.4) or paths[:NUM_SHOWN]
    return f"its modules have names such as {', '.join(near)}"


def closest_classes(model: nn.Module, given: str) -> str:
    """For errors: class names of the model's modules with parameters, the most similar first."""
    parts = [part for part in model.modules() if not isinstance(part, CONTAINERS)]
    names = sorted({type(part).__name__ for part in parts if has_parameters(part)})
    near = difflib.get_close_matches(given, names, n=len(names), cutoff=0.0)
    return f"its modules are of {', '.join(near)}"
