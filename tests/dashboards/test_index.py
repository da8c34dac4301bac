"""The run index: which files are on show, under which names, and what a bad file does to the others."""

from __future__ import annotations

import shutil
import signal
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import ModuleType

import h5py
import pytest

from keelscope.errors import RunNotFoundError
from keelscope.store.writer import RunWriter
from keelscope_dashboards import index as index_module
from keelscope_dashboards.index import RunIndex
from keelscope_dashboards.panels import PANELS


@pytest.fixture(autouse=True)
def scan_each_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(index_module, "RESCAN_SECONDS", 0.0)


def names(folder: Path) -> list[str]:
    index = RunIndex([folder])
    try:
        return [run.name for run in index.refresh().values()]
    finally:
        index.close()


def test_run_files_in_folders_get_unique_names(tmp_path: Path) -> None:
    for place in ("keel.h5", "demo-1/keel.h5", "demo-2/post_ln.h5", ".hidden.h5", "notes.txt", "keel.h5.parts/r0.h5"):
        path = tmp_path / place
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(b"")
    assert names(tmp_path) == ["demo-1/keel", "keel", "post_ln"]


def test_links_out_of_the_folder_are_not_followed(kit: ModuleType, tmp_path: Path) -> None:
    inside, outside = tmp_path / "inside", tmp_path / "outside"
    inside.mkdir()
    kit.write_run(outside / "secret.h5", "keel", layers=4, steps=2) if outside.mkdir() is None else None
    (inside / "link.h5").symlink_to(outside / "secret.h5")
    (inside / "folder").symlink_to(outside)
    assert names(inside) == []


def test_an_id_is_stable_and_does_not_tell_the_path(kit: ModuleType, tmp_path: Path) -> None:
    kit.write_run(tmp_path / "keel.h5", "keel", layers=4, steps=2)
    first, second = RunIndex([tmp_path]), RunIndex([tmp_path])
    assert list(first.refresh()) == list(second.refresh())
    assert all(len(run_id) == 16 and "keel" not in run_id for run_id in first.refresh())
    first.close()
    second.close()


def test_a_named_file_must_exist_and_a_folder_may_come_later(kit: ModuleType, tmp_path: Path) -> None:
    with pytest.raises(RunNotFoundError, match=r"none\.h5 does not exist; name a run file or a folder"):
        RunIndex([tmp_path / "none.h5"])
    later = RunIndex([tmp_path / "runs"])
    assert later.refresh() == {}
    (tmp_path / "runs").mkdir()
    kit.write_run(tmp_path / "runs" / "keel.h5", "keel", layers=4, steps=2)
    assert [run.name for run in later.refresh().values()] == ["keel"]
    later.close()


def test_a_broken_file_says_why_and_the_others_work(kit: ModuleType, tmp_path: Path) -> None:
    kit.write_run(tmp_path / "good.h5", "keel", layers=8, steps=6)
    (tmp_path / "text.h5").write_text("<script>alert(1)</script>")
    (tmp_path / "empty.h5").write_bytes(b"")
    whole = (tmp_path / "good.h5").read_bytes()
    (tmp_path / "short.h5").write_bytes(whole[: len(whole) // 3])
    with h5py.File(tmp_path / "foreign.h5", "w") as file:
        file["x"] = [1, 2]
    with kit.served(tmp_path) as app:
        states = app.judged()
        assert states["good"].status == "finished"
        for name in ("text", "empty", "short", "foreign"):
            assert states[name].status == "error", name
            assert len(states[name].error) > 20
            assert str(tmp_path) not in states[name].error
        assert app.client.get("/").status_code == 200


def test_a_repaired_file_comes_back(kit: ModuleType, tmp_path: Path) -> None:
    good = kit.write_run(tmp_path / "run.h5", "keel", layers=8, steps=6)
    content = good.read_bytes()
    good.write_bytes(b"nonsense")
    with kit.served(tmp_path) as app:
        assert app.judged()["run"].status == "error"
        good.write_bytes(content)
        state = app.judged()["run"]
        assert (state.status, state.rows) == ("finished", 6)


def test_a_live_run_is_followed_to_its_end(kit: ModuleType, tmp_path: Path) -> None:
    rows = kit.rows_of("keel", 8, 30)
    writer = RunWriter(tmp_path / "live.h5", kit.layout_of(8, planned=300))
    for row in rows[:10]:
        writer.append(row)
    writer.flush()
    with kit.served(tmp_path) as app:
        first = app.judged()["live"]
        assert (first.status, first.rows, first.head) == ("live", 10, 90)
        for row in rows[10:]:
            writer.append(row)
        writer.flush()
        second = app.judged()["live"]
        assert (second.rows, second.head) == (30, 290)
        assert second.revision > first.revision
        writer.close()
        assert app.judged()["live"].status == "finished"


def test_of_many_files_some_are_opened_at_a_look(
    kit: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("keelscope_dashboards.index.OPENING_SECONDS", 0.0)
    first = kit.write_run(tmp_path / "a.h5", "keel", layers=4, steps=2)
    for name in "bc":
        shutil.copy(first, tmp_path / f"{name}.h5")
    index = RunIndex([tmp_path])
    looks = [[run.status for run in index.refresh().values()] for _ in range(3)]
    assert looks == [["finished"] + 2 * ["waiting"], 2 * ["finished"] + ["waiting"], 3 * ["finished"]]
    index.close()


def test_a_run_that_is_being_read_holds_up_nobody(kit: ModuleType, tmp_path: Path) -> None:
    kit.write_run(tmp_path / "a.h5", "keel", layers=4, steps=2)
    with kit.served(tmp_path) as app:
        state = app.judged()["a"]
        with app.index.get(state.id).locked, ThreadPoolExecutor(1) as other:
            answer = other.submit(app.client.get, "/api/v1/state").result(timeout=20)
    assert [run["rows"] for run in answer.json["runs"]] == [2]


def test_a_removed_file_leaves_the_list(kit: ModuleType, tmp_path: Path) -> None:
    kit.write_run(tmp_path / "a.h5", "keel", layers=4, steps=2)
    kit.write_run(tmp_path / "b.h5", "keel", layers=4, steps=2)
    index = RunIndex([tmp_path])
    assert len(index.refresh()) == 2
    Path(tmp_path / "a.h5").unlink()
    assert [run.name for run in index.refresh().values()] == ["b"]
    index.close()


def test_a_killed_run_is_stopped_and_keeps_its_rows(kit: ModuleType, tmp_path: Path) -> None:
    script = (
        "import importlib.util, os, signal, sys\n"
        f"spec = importlib.util.spec_from_file_location('kit', {kit.__file__!r})\n"
        "kit = sys.modules['kit'] = importlib.util.module_from_spec(spec)\n"
        "spec.loader.exec_module(kit)\n"
        f"writer = kit.RunWriter({str(tmp_path / 'killed.h5')!r}, kit.layout_of(8))\n"
        "for row in kit.rows_of('keel', 8, 12):\n"
        "    writer.append(row)\n"
        "writer.flush()\n"
        "os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    assert subprocess.run([sys.executable, "-c", script], check=False).returncode == -signal.SIGKILL
    with kit.served(tmp_path) as app:
        state = app.judged()["killed"]
        assert (state.status, state.rows) == ("stopped", 12)
        assert state.verdict.headline == "flat"


def test_another_file_under_the_same_name_is_another_generation(kit: ModuleType, tmp_path: Path) -> None:
    path = kit.write_run(tmp_path / "run.h5", "keel", layers=8, steps=6)
    elsewhere = tmp_path / "new.part"
    elsewhere.mkdir()
    with kit.served(path) as app:
        (run,) = app.index.refresh().values()
        run.tile(PANELS[0])
        before = (run.generation, run.revision)
        kit.write_run(elsewhere / "run.h5", "post_ln", layers=12, steps=9).rename(path)
        app.index.refresh()
        assert run.generation == before[0] + 1
        assert run.revision > before[1]
        assert run.tile(PANELS[0]).kinds.shape == (9, 12)
