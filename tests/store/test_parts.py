from pathlib import Path

from keelscope.store.parts import find_parts, part_path


def test_parts_are_found_in_order_and_nothing_else_is(tmp_path: Path) -> None:
    run = tmp_path / "keel.h5"
    wanted = [(0, 1), (0, 2), (3, 0), (3, 1)]
    for rank, part in reversed(wanted):
        part_path(run, rank, part).parent.mkdir(exist_ok=True)
        part_path(run, rank, part).touch()
    for other in ("r00000.lock", "r00000.json", "r00000.p0003.h5.bak", "seal.tmp-12"):
        (tmp_path / "keel.h5.parts" / other).touch()

    assert list(find_parts(run)) == wanted
    assert all(path == part_path(run, *key) for key, path in find_parts(run).items())


def test_a_run_without_parts_has_none(tmp_path: Path) -> None:
    assert find_parts(tmp_path / "keel.h5") == {}
    assert part_path(tmp_path / "keel.h5", 0, 0) == tmp_path / "keel.h5"
