"""Importing is light, free of effects and of cycles, and follows the layers."""

from __future__ import annotations

import ast
import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PACKAGES = {"keelscope": ROOT / "keelscope", "keelscope_probes": ROOT / "probes/keelscope_probes",
            "keelscope_dashboards": ROOT / "dashboards/keelscope_dashboards"}  # fmt: skip
HEAVY = ("torch", "scipy", "plotly", "dash", "h5py", "pandas", "transformers", "timm", "waitress", "flask")


def modules_after(code: str) -> set[str]:
    script = f"import sys, json\n{code}\nprint(json.dumps(sorted(sys.modules)), file=sys.stderr)"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    return set(json.loads(done.stderr.splitlines()[-1]))


@pytest.mark.parametrize(
    "code",
    [
        "import keelscope",
        "from keelscope.cli import main; main(['--help'])",
        "from keelscope.cli import main; main(['report', '--help'])",
        "from keelscope.cli import main; main(['--version'])",
        "from keelscope.cli import main; main(['nonsense'])",
    ],
)
def test_light(code):
    loaded = modules_after(code)
    assert [name for name in HEAVY if name in loaded] == []


def test_import_brings_only_numpy_and_the_standard_library():
    """What `import keelscope` itself loads, beside the standard library."""
    foreign = {name.partition(".")[0] for name in modules_after("import keelscope") - modules_after("")}
    foreign -= set(sys.stdlib_module_names)
    assert {name for name in foreign if not name.startswith("_")} <= {"keelscope", "numpy"}


def test_reading_needs_no_torch():
    loaded = modules_after("import keelscope.terminal, keelscope.store.reader, keelscope.diagnosis")
    assert "torch" not in loaded


def test_import_has_no_effects():
    """No handler, no warning filter, no hook, no file: what the interpreter holds is as before."""
    code = """
import logging, signal, sys, threading, warnings, atexit, numpy
def state():
    return (sys.excepthook, sys.displayhook, list(sys.meta_path), list(sys.path), list(warnings.filters),
            warnings.showwarning, list(logging.root.handlers), signal.getsignal(signal.SIGINT),
            threading.active_count(), atexit._ncallbacks())
before = state()
import keelscope
assert state() == before, [pair for pair in zip(before, state()) if pair[0] != pair[1]]
"""
    subprocess.run([sys.executable, "-c", code], check=True)


def test_layers():
    """The contracts of pyproject.toml: which package may import which."""
    lint = Path(sys.executable).with_name("lint-imports")
    done = subprocess.run([lint, "--no-cache"], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout


def imports_of(path: Path, module: str) -> set[str]:
    """Modules of the project that a file imports at its top level, type-only imports included, local ones not."""
    found: set[str] = set()
    nodes = list(ast.parse(path.read_text()).body)
    nodes += [inner for node in nodes if isinstance(node, ast.If) for inner in node.body]
    for node in nodes:
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.level == 0 and node.module:
            found |= {f"{node.module}.{alias.name}" for alias in node.names} | {node.module}
    return found - {module}


def everything_imported_by(path: Path) -> set[str]:
    """Modules a file imports anywhere, also inside functions."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            found.add(node.module)
    return found


@pytest.mark.parametrize(
    ("package", "known"),
    [
        ("keelscope.store", ("keelscope.store", "keelscope.errors")),
        ("keelscope.models", ("keelscope.models",)),
        (
            "keelscope.analysis",
            ("keelscope.analysis", "keelscope.errors", "keelscope.store.series", "keelscope.store.schema"),
        ),
    ],
)
def test_what_a_package_may_know(package, known):
    """As the contracts say, and for modules that no contract lists yet."""
    files = {name: path for name, path in module_files().items() if name.startswith(package)}
    assert files
    for name, path in files.items():
        ours = {other for other in everything_imported_by(path) if other.partition(".")[0].startswith("keelscope")}
        assert {other for other in ours if not other.startswith(known)} == set(), name


def module_files() -> dict[str, Path]:
    files = {}
    for package, folder in PACKAGES.items():
        for path in folder.rglob("*.py"):
            parts = [package, *path.relative_to(folder).with_suffix("").parts]
            files[".".join(part for part in parts if part != "__init__")] = path
    return files


def test_no_cycles():
    files = module_files()
    graph = {name: {other for other in imports_of(path, name) if other in files} for name, path in files.items()}
    # An import of a.b.c runs a and a.b too, but a package that only re-exports is no cycle of its parts.
    graph = {name: {other for other in others if not name.startswith(f"{other}.")} for name, others in graph.items()}
    assert find_cycle(graph) is None


def find_cycle(graph: dict[str, set[str]]) -> list[str] | None:
    done: set[str] = set()

    def visit(name: str, trail: list[str]) -> list[str] | None:
        if name in trail:
            return [*trail[trail.index(name) :], name]
        if name in done:
            return None
        done.add(name)
        return next((cycle for other in sorted(graph[name]) if (cycle := visit(other, [*trail, name]))), None)

    return next((cycle for name in sorted(graph) if (cycle := visit(name, []))), None)


def test_cycles_would_be_found():
    assert find_cycle({"a": {"b"}, "b": {"c"}, "c": {"b"}}) == ["b", "c", "b"]
    assert find_cycle({"a": {"b"}, "b": {"c"}, "c": set()}) is None
