"""The shape of the code: short functions, files of one subject, names that say something, sorted exports."""

from __future__ import annotations

import ast
import importlib
import pkgutil
import statistics
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
FOLDERS = ("keelscope", "probes/keelscope_probes", "dashboards/keelscope_dashboards")
FILES = sorted(path for folder in FOLDERS for path in (ROOT / folder).rglob("*.py"))
EMPTY_NAMES = {"utils", "util", "core", "base", "common", "helpers", "misc"}


def trees() -> list[tuple[Path, ast.Module]]:
    return [(path.relative_to(ROOT), ast.parse(path.read_text())) for path in FILES]


def lengths() -> list[tuple[int, str]]:
    """Lines of every function, without its docstring."""
    found = []
    for path, tree in trees():
        for node in ast.walk(tree):
            if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
                body = node.body[1:] if ast.get_docstring(node) is not None and len(node.body) > 1 else node.body
                found.append((node.end_lineno - body[0].lineno + 1, f"{path}:{node.lineno} {node.name}"))
    return sorted(found)


def test_functions_are_short():
    sizes = lengths()
    assert statistics.median(size for size, _ in sizes) <= 10
    assert sizes[int(0.9 * len(sizes))][0] <= 35
    assert [where for size, where in sizes if size > 50] == []


def test_files_have_one_subject():
    assert [f"{path}: {n}" for path in FILES if (n := path.read_text().count("\n")) > 350] == []


def test_names_say_something():
    assert [path for path in FILES if path.stem in EMPTY_NAMES] == []


def test_every_module_says_what_it_is():
    assert [str(path) for path, tree in trees() if ast.get_docstring(tree) is None] == []


def exports(tree: ast.Module) -> list[str] | None:
    for node in tree.body:
        if isinstance(node, ast.Assign) and getattr(node.targets[0], "id", "") == "__all__":
            return list(ast.literal_eval(node.value))
    return None


def test_exports_are_sorted():
    """Constants, then classes, then functions, each in alphabetical order (as ruff sorts them), or plainly sorted."""
    for path, tree in trees():
        names = exports(tree)
        if names is not None:
            assert names in (sorted(names), sorted(names, key=_kind_first)), path


def _kind_first(name: str) -> tuple[int, str]:
    kind = 0 if name.isupper() else 1 if name[0].isupper() else 2
    return kind, name


@pytest.mark.parametrize("package", ["keelscope", "keelscope_probes", "keelscope_dashboards"])
def test_exports_exist_and_are_documented(package):
    root = importlib.import_module(package)
    names = [package, *(info.name for info in pkgutil.walk_packages(root.__path__, f"{package}."))]
    for name in names:
        if name.endswith("__main__"):
            continue
        module = importlib.import_module(name)
        for export in getattr(module, "__all__", []):
            value = getattr(module, export)
            if callable(value) and value.__module__ == name:
                assert value.__doc__, f"{name}.{export} has no docstring"


def test_inheritance_is_flat():
    """At most two levels of our own classes, errors excepted."""
    parents = {
        node.name: [base.id for base in node.bases if isinstance(base, ast.Name)]
        for path, tree in trees()
        if path.name != "errors.py"
        for node in ast.walk(tree)
        if isinstance(node, ast.ClassDef)
    }

    def depth(name: str) -> int:
        return 1 + max((depth(base) for base in parents[name] if base in parents and base != name), default=0)

    assert [name for name in parents if depth(name) > 2] == []
