"""Import the object that ``pkg.module:name`` or ``path/file.py:name`` names, and call it safely.

Used for model factories, batches (``--batch``) and losses (``--loss``). The folder of a file, or the current folder
for a module, is importable while its code runs, as it would be under ``python file.py``.
"""

from __future__ import annotations

import ast
import importlib
import importlib.util
import pkgutil
import sys
from contextlib import contextmanager
from difflib import get_close_matches
from pathlib import Path
from typing import TYPE_CHECKING

from keelscope.errors import FactoryError, TargetError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator
    from types import ModuleType

__all__ = ["call", "first_line", "import_object", "suggestion"]


def import_object(target: str, what: str) -> object:
    """Import the object that a target names.

    Args:
        target: ``pkg.module:name`` or ``path/file.py:name``; dots in the name walk attributes.
        what: word for the object in messages, e.g. ``"factory"``.

    Returns:
        The object, not called.

    Raises:
        TargetError: if the file, the module or the attribute does not exist.
        FactoryError: if importing the module raises.
    """
    place, _, name = target.rpartition(":")
    if not place or not name:
        hint = _named_in(Path(target)) if target.endswith(".py") else ""
        raise TargetError(f"{target!r} names no {what}; write pkg.module:{what} or path/file.py:{what}{hint}.")
    with _importable(_folder(place)):
        module = _import_file(Path(place)) if place.endswith(".py") else _import_module(place)
        return _attribute(module, name, target, what)


def call(function: Callable[[], object], target: str) -> object:
    """Call a factory without arguments, its folder importable.

    Args:
        function: the factory that `import_object` returned.
        target: what the user typed, for the message.

    Returns:
        What the factory returns.

    Raises:
        FactoryError: if it raises anything; the original error is chained.
    """
    place = target.rpartition(":")[0]
    with _importable(_folder(place)), _failures_as_factory_errors(f"{target} raised"):
        return function()


def first_line(error: BaseException) -> str:
    """``Type: message`` of an error, in one line."""
    message = next((line.strip() for line in str(error).splitlines() if line.strip()), "")
    return f"{type(error).__name__}: {message}" if message else type(error).__name__


def suggestion(name: str, known: Iterable[str]) -> str:
    """A clause naming the nearest known names, or the first few of them; empty if there are none."""
    names = list(dict.fromkeys(known))
    near = get_close_matches(name, names, n=3, cutoff=0.6)
    if near:
        return f"; did you mean {' or '.join(near)}?"
    if not names:
        return ""
    listed = ", ".join(names[:8]) + (", ..." if len(names) > 8 else "")
    return f"; there is {listed}"


def _import_file(path: Path) -> ModuleType:
    if not path.is_file():
        siblings = sorted(p.name for p in path.parent.glob("*.py")) if path.parent.is_dir() else []
        raise TargetError(f"there is no file {path}{suggestion(path.name, siblings)}")
    name = f"keelscope_target_{path.stem}"  # its own name, so that model.py cannot be taken for an installed `model`
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise TargetError(f"{path} is not a Python file that can be imported.")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses and pickle look a class's module up by name
    with _failures_as_factory_errors(f"importing {path} raised"):
        spec.loader.exec_module(module)
    return module


def _import_module(name: str) -> ModuleType:
    try:
        with _failures_as_factory_errors(f"importing {name} raised"):
            return importlib.import_module(name)
    except FactoryError as error:
        missing = error.__cause__
        if isinstance(missing, ModuleNotFoundError) and f"{name}.".startswith(f"{missing.name}."):
            raise TargetError(_no_module(missing.name or name)) from missing
        raise


def _no_module(name: str) -> str:
    parent, _, leaf = name.rpartition(".")
    paths = getattr(sys.modules.get(parent), "__path__", None) if parent else None
    if parent and paths is None:
        return f"there is no module {name}: {parent} is a module, not a package."
    known = sorted(info.name for info in pkgutil.iter_modules(paths))
    near = get_close_matches(leaf, known, n=3)
    hint = f"did you mean {' or '.join(near)}" if near else "is it installed, or in the current folder"
    return f"there is no module {name}; {hint}?"


def _attribute(module: ModuleType, name: str, target: str, what: str) -> object:
    found: object = module
    for part in name.split("."):
        if not hasattr(found, part):
            known = sorted(n for n, v in vars(module).items() if not n.startswith("_") and callable(v))
            raise TargetError(f"{target}: no {what} {part!r} there{suggestion(part, known)}")
        found = getattr(found, part)
    return found


def _named_in(path: Path) -> str:
    """A clause listing the functions and classes a file defines, without running it."""
    try:
        tree = ast.parse(path.read_bytes())
    except (OSError, SyntaxError, ValueError):
        return ""
    names = [node.name for node in tree.body if isinstance(node, (ast.FunctionDef, ast.ClassDef))]
    return f"; {path.name} defines {', '.join(names[:8])}" if names else ""


def _folder(place: str) -> str:
    return str(Path(place).resolve().parent if place.endswith(".py") else Path.cwd())


@contextmanager
def _importable(folder: str) -> Iterator[None]:
    sys.path.insert(0, folder)
    try:
        yield
    finally:
        if folder in sys.path:
            sys.path.remove(folder)


@contextmanager
def _failures_as_factory_errors(prefix: str) -> Iterator[None]:
    """User code may raise anything, and a script without a main guard may exit."""
    try:
        yield
    except (Exception, SystemExit) as error:
        raise FactoryError(f"{prefix} {first_line(error)} (--debug shows where).") from error
