"""Code of the user's own: imported by its path, told by its kind, and its errors described in one line."""

import ast
import difflib
import importlib
import importlib.util
import inspect
import os
import sys
import sysconfig
import traceback
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any, Literal

from shardwise.config import ConfigError, error_text

MAX_MESSAGE_CHARS = 500
"""How much is kept of text that user code produced; an exception may carry a whole dataset in its message."""


def load_function(
    spec: str,
    *,
    key: str = "reward.functions",
    expected: str = "compute_score(data_source, solution_str, ground_truth, extra_info)",
) -> Callable[..., Any]:
    """Imports a reward function (or the class of a manager) by name, which runs its module's top level.

    The folder of a file is appended to sys.path: it can import its neighbours, and they hide no installed package.

    Args:
        spec: `path/to/file.py:name`, relative to the working directory, or `package.module:name`.
        key, expected: the config key that holds `spec`, and the signature that it needs, for errors.
    Raises:
        ConfigError: no colon, no such file, the import failed (with its cause), no such name (with the nearest), or
            the name is not callable.
    """
    location, separator, name = spec.rpartition(":")
    if not separator or not location or not name:
        raise ConfigError(
            f"{key}={spec!r} is not of the form path/to/file.py:name or package.module:name, "
            "e.g. rules.py:compute_score"
        )
    try:
        module = _import_file(spec, Path(location), key) if _is_path(location) else importlib.import_module(location)
    except ConfigError:
        raise
    except (Exception, SystemExit) as error:
        raise ConfigError(f"{key}={spec}: importing {location} failed: {describe_error(error)}") from error
    try:
        function = getattr(module, name)
    except AttributeError:
        nearest = difflib.get_close_matches(name, vars(module), n=1)
        hint = f"did you mean {nearest[0]}?" if nearest else f"define it there or name one of {_callables(module)}"
        raise ConfigError(f"{key}={spec}: {location} has no {name!r}; {hint}") from None
    if not callable(function):
        raise ConfigError(f"{key}={spec}: {name} is a {type(function).__name__}, expected {expected}")
    return function


def source_file(spec: str) -> Path | None:
    """Returns the file that `load_function` imports the function from; None if this machine has none."""
    location = spec.rpartition(":")[0]
    if _is_path(location):
        file = Path(location)
    else:
        try:
            found = importlib.util.find_spec(location)
        except (Exception, SystemExit):  # of the package around it, which is imported; `load_function` tells it
            return None
        file = Path("" if found is None or found.origin is None else found.origin)
    return file if file.is_file() else None


def kind_of_callable(function: Callable[..., Any]) -> Literal["class", "coroutine function", "generator", "function"]:
    """Classifies a callable by what a call gives: an instance (class), something that has not computed anything yet
    (coroutine function, generator), or an answer (function)."""
    if inspect.isclass(function):
        return "class"
    for called in (function, type(function).__call__):  # the second is what runs where an object is called
        if inspect.iscoroutinefunction(called):
            return "coroutine function"
        if inspect.isgeneratorfunction(called) or inspect.isasyncgenfunction(called):
            return "generator"
    return "function"


def describe_error(error: BaseException) -> str:
    """Describes an error in one line: type, message, and the last line of user code (not Python's, Shardwise's or a
    package's) that was reached."""
    text = f"{type(error).__name__}: {one_line(error_text(error))}".removesuffix(": ")
    lines = [(frame.f_code.co_filename, line) for frame, line in traceback.walk_tb(error.__traceback__)]
    user_lines = [(file, line) for file, line in lines if not file.startswith(_NOT_USER_CODE)]
    if not user_lines:
        return text
    file, line = user_lines[-1]
    return f"{text} ({Path(file).name} line {line})"


def writable(text: str) -> str:
    """Returns the text with "?" for every half of a surrogate pair, which Python's strings can hold and no file can."""
    return text.encode(errors="replace").decode()


def one_line(text: str) -> str:
    """Returns the text without line breaks, cut to `MAX_MESSAGE_CHARS`."""
    text = writable(" ".join(text[: 2 * MAX_MESSAGE_CHARS].split()))
    return text if len(text) <= MAX_MESSAGE_CHARS else f"{text[:MAX_MESSAGE_CHARS]}..."


_NOT_USER_CODE = (
    "<",
    *(sysconfig.get_path(name) for name in ("stdlib", "purelib", "platlib")),
    f"{Path(__file__).parents[1]}{os.sep}",  # this package
)


def _is_path(location: str) -> bool:
    return location.endswith(".py") or "/" in location


def _import_file(spec: str, path: Path, key: str) -> ModuleType:
    if not path.is_file():
        raise ConfigError(
            f"{key}={spec}: there is no file {path} in {Path.cwd()}; give a path relative to the folder the "
            "command is started in, or an absolute one"
        )
    path = path.resolve()
    # The prefix keeps a file called math.py or json.py from taking the place of Python's own module; two files of one
    # name get modules of their own, and two functions of one file share its module.
    name = f"_reward_file_{path.stem}"
    while name in sys.modules:
        if sys.modules[name].__file__ == str(path):
            return sys.modules[name]
        name += "_"
    sys.path.append(str(path.parent))
    _require_own_neighbours(spec, path, key)
    module_spec = importlib.util.spec_from_file_location(name, path)
    if module_spec is None or module_spec.loader is None:
        raise ConfigError(f"{key}={spec}: {path.name} is not a Python file; its name must end in .py")
    module = importlib.util.module_from_spec(module_spec)
    # Dataclasses and pickling look their module up by name.
    sys.modules[name] = module
    try:
        module_spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    return module


def _require_own_neighbours(spec: str, path: Path, key: str) -> None:
    """Raises ConfigError: a file imports a neighbour by a name for which Python takes another file of the user's, as it
    does where two rewards have such neighbours."""
    try:
        tree = ast.parse(path.read_bytes())
    except (SyntaxError, ValueError, OSError):  # its import tells
        return
    imports = [node for node in ast.walk(tree) if isinstance(node, ast.Import | ast.ImportFrom)]
    froms = [node.module or "" for node in imports if isinstance(node, ast.ImportFrom) and node.level == 0]
    names = [*froms, *(alias.name for node in imports if isinstance(node, ast.Import) for alias in node.names)]
    for name in dict.fromkeys(name.partition(".")[0] for name in names):
        meant = next(filter(Path.is_file, (path.parent / f"{name}.py", path.parent / name / "__init__.py")), None)
        if meant is None:
            continue
        try:
            found = importlib.util.find_spec(name)
        except ValueError:  # a module without a spec
            continue
        taken = Path("" if found is None or found.origin is None else found.origin)
        if not taken.is_file() or str(taken).startswith(_NOT_USER_CODE):
            continue
        if taken.read_bytes() != meant.read_bytes():
            raise ConfigError(
                f"{key}={spec}: {path.name} imports {name}, and Python takes {taken} for it, not {meant} beside it; "
                "rename one of the two"
            )


def _callables(module: ModuleType) -> str:
    names = [name for name, value in vars(module).items() if callable(value) and not name.startswith("_")]
    return ", ".join(names[:10]) or "(the module defines no function)"
