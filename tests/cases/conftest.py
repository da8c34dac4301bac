"""The cases are data: they are loaded one by one in their own processes, never collected."""

from __future__ import annotations

collect_ignore = ["runner.py"]
collect_ignore_glob = ["handed/*"]
