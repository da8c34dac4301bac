"""Names of the files that one run consists of while it is written.

``runs/keel.h5`` is part 0 of rank 0. Further parts and other ranks lie in ``runs/keel.h5.parts/``. `destination` makes
them, readers find them here.
"""

from __future__ import annotations

import re
from pathlib import Path

from keelscope.store.lock import parts_folder

__all__ = ["find_parts", "part_path", "place_of"]

_FOLDER = ".parts"
_PART = re.compile(r"r(\d{5})\.p(\d{4})\.h5")


def part_path(path: Path, rank: int, part: int) -> Path:
    """Where one part of a run lies.

    Args:
        path: the name of the run.
        rank: the rank that writes it.
        part: its number among the files of that rank.

    Returns:
        The run file itself for part 0 of rank 0, else a file in its folder of parts.

    Example:
        >>> part_path(Path("runs/keel.h5"), 3, 1).as_posix()
        'runs/keel.h5.parts/r00003.p0001.h5'
    """
    return parts_folder(path) / f"r{rank:05d}.p{part:04d}.h5" if (rank, part) > (0, 0) else path


def find_parts(path: Path) -> dict[tuple[int, int], Path]:
    """The parts of a run that exist, the run file itself left out.

    Args:
        path: the name of the run.

    Returns:
        (rank, part) to file, in that order.
    """
    try:
        names = sorted(entry.name for entry in parts_folder(path).iterdir())
    except OSError:
        return {}
    matches = (match for name in names if (match := _PART.fullmatch(name)))
    return {(int(match[1]), int(match[2])): parts_folder(path) / match[0] for match in matches}


def place_of(path: Path) -> tuple[Path, int, int]:
    """Which part of which run a file is, by its name.

    Args:
        path: any run file or part.

    Returns:
        The run file, rank and part; the file itself, 0 and 0 if its name is not that of a part.

    Example:
        >>> place_of(Path("runs/keel.h5.parts/r00003.p0001.h5"))[1:]
        (3, 1)
    """
    match, folder = _PART.fullmatch(path.name), path.parent.name
    if match is None or not folder.endswith(_FOLDER) or folder == _FOLDER:
        return path, 0, 0
    return path.parent.with_name(folder.removesuffix(_FOLDER)), int(match[1]), int(match[2])
