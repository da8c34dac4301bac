"""A name that all ranks of one launch derive for themselves, so that their files land with the same run.

Ranks do not talk to each other while they train. `destination` compares this name with the notes of other ranks.
"""

from __future__ import annotations

import hashlib
import os
import uuid
from collections.abc import Mapping

from keelscope.store.lock import identity

__all__ = ["session_id"]

_SHARED = (
    "TORCHELASTIC_RUN_ID",
    "TORCHELASTIC_RESTART_COUNT",
    "MASTER_ADDR",
    "MASTER_PORT",
    "SLURM_JOB_ID",
    "SLURM_STEP_ID",
    "SLURM_RESTART_COUNT",
)
_opened: dict[str, int] = {}


def session_id(run: str, world_size: int, environment: Mapping[str, str] | None = None) -> str:
    """The session that a writer which opens a run now belongs to.

    A process alone draws it at random. Several hash what their launcher told all of them (run id, address and port of
    the master, job and step of Slurm, restart count), and how often they have opened a run of that name, since a script
    may record several. Where that can be the same for the next launch (no run id, all on one machine), the process that
    started them counts too.

    Args:
        run: the name the user gave to the run.
        world_size: number of ranks.
        environment: variables of the process, those of `os.environ` if None.

    Returns:
        32 hex digits.

    Example:
        >>> job = {"SLURM_JOB_ID": "7", "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "1"}
        >>> first = session_id("a", 2, job)
        >>> len(first), first == session_id("a", 2, job)
        (32, False)
    """
    if world_size <= 1:
        return uuid.uuid4().hex
    variables = os.environ if environment is None else environment
    _opened[run] = _opened.get(run, 0) + 1
    shared = [f"{name}={variables[name]}" for name in _SHARED if name in variables]
    if not shared or (_on_one_machine(variables, world_size) and not _has_own_name(variables)):
        shared.append("parent {} {}".format(*identity(os.getppid())))
    return hashlib.sha256("\n".join([run, str(_opened[run]), *shared]).encode()).hexdigest()[:32]


def _on_one_machine(variables: Mapping[str, str], world_size: int) -> bool:
    local = variables.get("MASTER_ADDR") in {"localhost", "127.0.0.1", "::1"}
    return local or variables.get("LOCAL_WORLD_SIZE") == str(world_size)


def _has_own_name(variables: Mapping[str, str]) -> bool:
    """Torchrun calls a launch "none" that was given no run id."""
    return "SLURM_JOB_ID" in variables or variables.get("TORCHELASTIC_RUN_ID", "none") != "none"
