"""Several real processes on the CPU: one server imports torch once and forks the ranks of every job."""

from __future__ import annotations

import pickle
import subprocess
import sys
from pathlib import Path

import pytest

JOBS = Path(__file__).parent / "jobs.py"


class Server:
    """Runs a function of `jobs.py` on each of several ranks, once, and gives back what they returned."""

    def __init__(self) -> None:
        self._process = subprocess.Popen([sys.executable, str(JOBS)], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        self._results: dict[tuple, list] = {}

    def __call__(self, world: int, job: str, *arguments: object) -> list:
        key = (world, job, *arguments)
        if key not in self._results:
            self._results[key] = self._run(world, job, arguments)
        return self._results[key]

    def _run(self, world: int, job: str, arguments: tuple) -> list:
        pickle.dump((world, job, arguments), self._process.stdin)
        self._process.stdin.flush()
        results = pickle.load(self._process.stdout)
        errors = [result for result in results if isinstance(result, str) and "Traceback" in result]
        assert not errors, "\n".join(errors)
        return results

    def close(self) -> None:
        self._process.stdin.close()
        self._process.wait(timeout=30)
        self._process.stdout.close()


@pytest.fixture(scope="session")
def on_ranks():
    server = Server()
    yield server
    server.close()
