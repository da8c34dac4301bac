"""The cases are data, and the checks run in processes of their own: only the tests are collected."""

from __future__ import annotations

from pathlib import Path

collect_ignore = [path.name for path in Path(__file__).parent.glob("*.py") if not path.name.startswith("test_")]
collect_ignore_glob = ["handed/*", "own/*"]
