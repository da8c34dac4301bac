"""Seals a run when it is closed: a short one at once, a long one in a process of its own at the lowest priority.

That process belongs to nobody: it goes on when training ends or is killed, and if it is killed itself, the run is as
complete and readable as before, only larger. `writer` calls it after the last row is safe.
"""

from __future__ import annotations

import logging
import subprocess
import sys
import threading
from pathlib import Path

from keelscope.store.parts import find_parts

__all__ = ["seal_closed_run"]

_AT_ONCE = 16 * 2**20
_PATIENCE = 5.0
_log = logging.getLogger(__name__)
_RUN = (
    "import sys; sys.path.append(sys.argv[1]); from keelscope.store.sealing import main; sys.exit(main(sys.argv[2:]))"
)


def seal_closed_run(path: Path, precision: str) -> str:
    """Seal a run of which this process has closed its last part; the last of several ranks does it.

    Args:
        path: the named file, as an absolute path.
        precision: see `sealing.seal`.

    Returns:
        Why the run could not be sealed, as a sentence; empty if it was, is being sealed, or others still write it.
    """
    try:
        files = [path, *find_parts(path).values()]
        if sum(file.stat().st_size for file in files if file.exists()) <= _AT_ONCE:
            from keelscope.store.sealing import seal

            seal(path, precision)
        else:
            _start(path, precision)
    except Exception as error:  # training must go on whatever it was, and all rows are safe
        return f"{path} was not compressed ({str(error).rstrip('.')}); its rows are complete and readable as they are."
    return ""


def _start(path: Path, precision: str) -> None:
    """Start a process that outlives this one, and wait for it a little."""
    home = Path(__file__).parents[2]
    process = subprocess.Popen(
        [sys.executable, "-P", "-c", _RUN, str(home), str(path), precision],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
        cwd="/",
    )
    try:
        process.wait(_PATIENCE)
    except subprocess.TimeoutExpired:
        _log.info("keelscope: %s is being compressed in the background; it can be read meanwhile", path.name)
        _reap(process)


def _reap(process: subprocess.Popen[bytes]) -> None:
    """Wait for it in a thread, so that it does not stay as a zombie."""
    try:
        threading.Thread(target=process.wait, name="keelscope-sealer", daemon=True).start()
    except RuntimeError:  # the interpreter is ending and starts no threads; init will take it over
        process.returncode = 0
