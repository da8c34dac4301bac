"""keelscope beside what people use today; ``python tests/bench/beside.py`` rewrites its part of the page.

Makes environments of its own in build/peers, installs there what requirements/peers*.txt name, and measures every tool
in a process of its own. What was measured is kept in build/peers/results.json: ``--only NAME`` measures one tool anew
and leaves the other rows as they are. What cannot be installed or does not run has a row that says so.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import platform
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

from besidetable import ROWS, TILES, described, section
from page import PAGE, replaced

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "build" / "peers"
CONSTRAINED = ("--constraint", "requirements/constraints.txt")
ENVIRONMENTS = {  # what pip is asked for
    "main": [*CONSTRAINED, "--requirement", "requirements/peers.txt"],
    "composer": ["--requirement", "requirements/peers-composer.txt"],
}

Results = dict[str, list[dict[str, object]]]


def python_of(environment: str) -> Path:
    return FOLDER / environment / "bin" / "python"


def pip(environment: str, *arguments: str) -> str:
    """The first error that pip tells, or nothing."""
    command = [python_of(environment), "-m", "pip", "-qq", "--disable-pip-version-check", "install", *arguments]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    errors = [line for line in done.stderr.splitlines() if line.startswith("ERROR")] or ["ERROR: pip failed"]
    return errors[0] if done.returncode else ""


def asked() -> list[str]:
    lines = (ROOT / "requirements/peers.txt").read_text().splitlines()
    return [wanted for line in lines if (wanted := line.partition("#")[0].strip())]


def installed(environment: str) -> str:
    """Make an environment, if it is not there yet; what went wrong, or nothing."""
    wanted = ENVIRONMENTS[environment]
    files = [(ROOT / path).read_bytes() for path in wanted if path.endswith(".txt")]
    stamp = FOLDER / environment / f".installed-{hashlib.sha256(b''.join(files)).hexdigest()[:12]}"
    if stamp.exists():
        return ""
    print(f"Installing into build/peers/{environment}, once (minutes) ...", flush=True)
    if not python_of(environment).exists():
        subprocess.run(["scripts/make-venv", sys.executable, str(FOLDER / environment)], cwd=ROOT, check=True)
    failed = pip(environment, *wanted)
    if environment != "main":
        told = failed
    else:
        told = pip(environment, *CONSTRAINED, "hatchling", "editables")
        told = told or pip(environment, *CONSTRAINED, "--no-build-isolation", "--editable", ".")
        for line in asked() if failed else ():
            pip(environment, *CONSTRAINED, line)  # all but the one that cannot be had
    if not failed and not told:
        stamp.touch()
    return told


def measured(names: list[str], tiles: list[str], environment: str) -> Iterator[dict[str, object]]:
    """One entry per tool and tile, as they are found."""
    command = [python_of(environment), str(Path(__file__).parent / "besideone.py"), ",".join(names), ",".join(tiles)]
    settings = dict(os.environ, OMP_NUM_THREADS="1", PYTHONDONTWRITEBYTECODE="1", WANDB_SILENT="true")
    log = FOLDER / f"{environment}.log"
    with (
        log.open("w") as err,
        subprocess.Popen(command, stdout=subprocess.PIPE, stderr=err, text=True, env=settings) as run,
    ):
        for line in run.stdout or ():
            if line.startswith('{"name"'):
                yield json.loads(line)


def entries(names: list[str], tiles: list[str], environment: str) -> Iterator[tuple[str, dict[str, object]]]:
    wrong = installed(environment) if names else ""
    if wrong:
        yield from ((name, {"error": wrong}) for name in names)
    elif names:
        yield from ((str(entry["name"]), entry) for entry in measured(names, tiles, environment))


def load(path: Path) -> Results:
    return json.loads(path.read_text()) if path.exists() else {}


def merged(told: list[dict[str, object]], entry: dict[str, object]) -> list[dict[str, object]]:
    """The entries of a tool with a new one in place of that of its tile."""
    others = [other for other in told if "tile" in other and other["tile"] != entry.get("tile")]
    return sorted([*others, entry], key=lambda entry: str(entry.get("tile")))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", default="", help="measure this tool anew, or several with commas; keep the others")
    parser.add_argument("--tiles", default=",".join(TILES), help="measure these anew; keep the others")
    parser.add_argument("--page", action="store_true", help="measure nothing: write the page from what was measured")
    options = parser.parse_args()
    only = [name for name in options.only.split(",") if name]
    tiles = options.tiles.split(",")
    path = FOLDER / "results.json"
    FOLDER.mkdir(parents=True, exist_ok=True)
    results = load(path) if only or options.page or len(tiles) < len(TILES) else {}
    for environment in () if options.page else ENVIRONMENTS:
        names = [row.name for row in ROWS if row.environment == environment and (not only or row.name in only)]
        for name, entry in entries(names, tiles, environment):
            results[name] = merged(results.get(name, []), entry)
            results["machine"] = [{"text": described(platform.python_version())}]
            path.write_text(json.dumps(results, indent=1))
            print(name, entry.get("tile", ""), entry.get("ratio", entry.get("error")), flush=True)
    PAGE.write_text(replaced(PAGE.read_text(), "beside", section(results)))


if __name__ == "__main__":
    main()
