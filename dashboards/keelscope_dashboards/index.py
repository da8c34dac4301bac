"""`RunIndex`: the run files below the folders the user named, behind opaque ids.

A request names an id, which is looked up in a dict made by scanning the folders; no request ever builds a path, and
links that lead out of the named folders are not followed.
"""

from __future__ import annotations

import hashlib
import os
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING

from keelscope.errors import RunNotFoundError
from keelscope_dashboards.followed import FollowedRun

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

__all__ = ["RunIndex"]

MAX_RUNS = 500
MAX_DEPTH = 3
SUFFIXES = {".h5", ".hdf5"}
RESCAN_SECONDS = 0.9
OPENING_SECONDS = 0.5
"""How long one look may open files; of hundreds the rest is opened by the next ones."""


class RunIndex:
    """All runs on show. Thread-safe.

    Args:
        targets: run files and folders of run files.
        source: makes the reader of one file from its path and name.

    Raises:
        RunNotFoundError: if a run file that was named does not exist.
    """

    def __init__(self, targets: Sequence[Path], *, source: Callable[[Path, str], FollowedRun] = FollowedRun) -> None:
        for target in targets:
            if target.suffix in SUFFIXES and not target.exists():
                raise RunNotFoundError(f"{target} does not exist; name a run file or a folder of run files.")
        self._targets = tuple(target.absolute() for target in targets)
        self._make = source
        self._lock = threading.Lock()
        self._sources: dict[str, FollowedRun] = {}
        self._scanned = 0.0

    @property
    def title(self) -> str:
        """What is on show, in a word: the name of the folder, or of the only file."""
        names = [target.stem if target.suffix in SUFFIXES else target.name for target in self._targets]
        return names[0] if len(names) == 1 else f"{len(names)} places"

    def get(self, run_id: str) -> FollowedRun | None:
        """The run behind an id, None if there is none."""
        return self._sources.get(run_id)

    def refresh(self) -> dict[str, FollowedRun]:
        """Scan for new and removed files and follow those being written, at most once a second.

        Returns:
            Sources by id, in the order of their names.
        """
        with self._lock:
            if time.monotonic() - self._scanned >= RESCAN_SECONDS:
                self._sources = self._scan()
                if self._follow():
                    self._scanned = time.monotonic()
        return self._sources

    def close(self) -> None:
        """Release all files."""
        with self._lock:
            for source in self._sources.values():
                source.close()
            self._sources = {}

    def _follow(self) -> bool:
        """Poll the runs that are open, then open further ones while there is time; whether all are."""
        late = time.monotonic() + OPENING_SECONDS
        waiting = [source for source in self._sources.values() if source.status == "waiting"]
        for source in self._sources.values():
            if source.status != "waiting":
                source.poll()
        for source in waiting:
            source.poll()
            if time.monotonic() > late:
                break
        return not any(source.status == "waiting" for source in waiting)

    def _scan(self) -> dict[str, FollowedRun]:
        """The sources as the folders are now; readers keep the dict they hold, which is never changed."""
        found = {_id_of(path): (path, name) for path, name in _named(self._targets)}
        for gone in self._sources.keys() - found.keys():
            self._sources[gone].close()
        return {run_id: self._sources.get(run_id) or self._make(*found[run_id]) for run_id in found}


def _id_of(path: Path) -> str:
    """The same file keeps its id over restarts; the id does not tell the path."""
    return hashlib.blake2s(str(path).encode(), digest_size=8).hexdigest()


def _named(targets: Sequence[Path]) -> list[tuple[Path, str]]:
    """Files with unique display names, sorted: the stem, with parent folders in front where stems collide."""
    files: dict[Path, Path] = {}
    for target in targets:
        for path in _run_files(target):
            files.setdefault(path, target)
    stems = [path.stem for path in files]
    named = []
    for path, target in files.items():
        relative = path.relative_to(target).with_suffix("") if path != target else Path(path.stem)
        named.append((path, path.stem if stems.count(path.stem) == 1 else relative.as_posix()))
    return sorted(named, key=lambda item: item[1])[:MAX_RUNS]


def _run_files(target: Path) -> Iterator[Path]:
    if target.is_file():
        yield target
        return
    root = os.path.realpath(target)
    for folder, names, files in os.walk(target):
        depth = len(Path(folder).relative_to(target).parts)
        names[:] = [] if depth >= MAX_DEPTH else sorted(name for name in names if not name.endswith(".parts"))
        for name in sorted(files):
            path = Path(folder) / name
            if path.suffix in SUFFIXES and not name.startswith(".") and _inside(path, root):
                yield path


def _inside(path: Path, root: str) -> bool:
    real = os.path.realpath(path)
    return os.path.commonpath([real, root]) == root and Path(real).is_file()
