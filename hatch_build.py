"""Build hook: compile ``native/*.c`` where a C compiler is found; without one the package is pure Python.

``CC`` names the compiler (``CC=false`` does without), ``CFLAGS`` adds options. An editable install compiles into the
source tree, as does ``python hatch_build.py``; a wheel is built without touching the tree.
"""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

ROOT = Path(__file__).parent
TARGET = "keelscope/_kernel.abi3.so"
OPTIONS = ("-O3", "-std=c11", "-fPIC", "-shared", "-fopenmp-simd", "-fno-math-errno", "-fvisibility=hidden")


class KernelHook(BuildHookInterface):  # type: ignore[type-arg]
    """Adds the compiled kernel to a wheel, and the platform to the wheel's name."""

    PLUGIN_NAME = "custom"

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Compile; called by hatchling before it collects files."""
        root = Path(self.root)
        self._folder = tempfile.mkdtemp(prefix="keelscope-build-")
        target = root / TARGET if version == "editable" else Path(self._folder) / "kernel.so"
        if not compile_kernel(root / "native", target):
            return
        if version != "editable":
            build_data["force_include"][str(target)] = TARGET
        build_data["pure_python"] = False
        build_data["tag"] = f"cp311-abi3-{sysconfig.get_platform().replace('-', '_').replace('.', '_')}"

    def finalize(self, version: str, build_data: dict[str, Any], artifact_path: str) -> None:  # noqa: ARG002
        """Remove what was made on the way; called by hatchling at the end."""
        shutil.rmtree(self._folder, ignore_errors=True)


def compile_kernel(source: Path, target: Path) -> bool:
    """Compile the kernel.

    Args:
        source: the folder of the C files.
        target: where to put the module; an older one is replaced, or removed if there is no compiler.

    Returns:
        Whether it is there. What went wrong is said on stderr, and is no error: the torch kernels do the same work.
    """
    fresh = target.with_name(f"{target.name}.{os.getpid()}.tmp")
    compiler = _compiler()
    said = "no C compiler was found"
    if compiler:
        options = [*OPTIONS, *shlex.split(os.environ.get("CFLAGS", "")), f"-I{sysconfig.get_path('include')}"]
        command = [*compiler, *options, *map(str, sorted(source.glob("*.c"))), "-o", str(fresh), "-lm"]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        said = f"{shlex.join(compiler)} failed: {done.stderr[-500:].strip()}"
        if done.returncode == 0 and fresh.exists():
            fresh.replace(target)
            return True
    fresh.unlink(missing_ok=True)
    target.unlink(missing_ok=True)
    print(f"keelscope: built without its kernel ({said}); torch operations do the same work", file=sys.stderr)
    return False


def _compiler() -> list[str]:
    """The command of a C compiler; empty where there is none."""
    if sys.platform != "linux":
        return []
    asked = os.environ.get("CC")
    candidates = [asked] if asked else [sysconfig.get_config_var("CC") or "cc", "cc", "gcc", "clang"]
    commands = [shlex.split(candidate) for candidate in candidates]
    return next((command for command in commands if command and shutil.which(command[0])), [])


if __name__ == "__main__":
    sys.exit(not compile_kernel(ROOT / "native", ROOT / TARGET))
