"""Several parts read as one, against a merge by hand with dictionaries."""

from __future__ import annotations

import math
import zlib
from dataclasses import dataclass, replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from keelscope.store.memory import MemoryWriter
from keelscope.store.merged import Merged
from keelscope.store.pieces import Piece
from keelscope.store.schema import SCALARS, GroupSpec, PartInfo, Row, RunInfo, RunLayout, Site, StatisticSpec

RULES = {"first": "", "total": "sum", "largest": "max", "average": "mean", "level": "rms", "norm": "root_sum_squares"}
SPECS = tuple(StatisticSpec(name, "1", name, across_ranks=rule) for name, rule in RULES.items())
GROUPS = {"acts": {"reduce": "local"}, "weights": {"reduce": "replica"}}


@dataclass(frozen=True)
class Drawn:
    """One part: what it holds is decided by `number`, so that the reference can make it again."""

    part: PartInfo
    session: int
    steps: tuple[int, ...]
    sites: tuple[str, ...]
    groups: tuple[str, ...]


def drawn(*key):
    return zlib.crc32(repr(key).encode())


def value(rank, part, step, site, statistic):
    seed = drawn(rank, part, step, site, statistic) % 1000
    low = 0 if statistic in {"level", "norm"} else 300
    return (seed - low) * (1e200 if seed % 50 == 0 else 1.0) + 0.5


def is_seen(rank, part, step, site):
    return drawn(rank, part, step, site) % 5 > 0


def recorded(one, group, step):
    return group in one.groups and (group == "acts" or one.part.rank == 0) and drawn(step, group) % 4 > 0


def source_of(one):
    sites = tuple(Site(path, "Linear") for path in one.sites)
    groups = tuple(GroupSpec(name, SPECS, sites, provenance=GROUPS[name]) for name in one.groups)
    info = RunInfo("t", "id", "2026-01-01T00:00:00+00:00")
    writer = MemoryWriter(RunLayout(info, groups, ("loss",), part=one.part))
    for step in one.steps:
        values, observed = {}, {}
        for group in (name for name in one.groups if recorded(one, name, step)):
            seen = np.array([is_seen(one.part.rank, one.part.part, step, site) for site in one.sites])
            table = {s: [value(one.part.rank, one.part.part, step, site, s) for site in one.sites] for s in RULES}
            values[group] = {name: np.where(seen, np.array(column), np.nan) for name, column in table.items()}
            observed[group] = seen
        writer.append(Row(step, step / 4, values, {"loss": one.part.rank + step / 7}, observed))
    return writer.run()._source


@st.composite
def runs(draw):
    """Sessions of one or more ranks, each rank with one or more parts; a later session goes on at an earlier step."""
    parts, numbers, begin = [], {}, 0
    for session in range(draw(st.integers(1, 3))):
        world = draw(st.integers(1, 3))
        start = max(0, begin - draw(st.integers(0, 4))) if session else 0
        for rank in range(world):
            step = start + draw(st.integers(0, 2))
            if rank and draw(st.integers(0, 4)) == 0:
                continue
            for _ in range(draw(st.integers(1, 2))):
                count = draw(st.integers(0, 4))
                steps = tuple(range(step, step + count))
                step += count
                sites = tuple(draw(st.permutations(["a", "b", "c", "d"])))[: draw(st.integers(1, 4))]
                groups = tuple(draw(st.sampled_from([("acts",), ("acts", "weights"), ("weights", "acts")])))
                number = numbers[rank] = numbers.get(rank, -1) + 1
                resumed = start if session else -1
                info = PartInfo(rank, world, number, f"s{session}", steps[0] if steps else step, resumed)
                parts.append(Drawn(info, session, steps, sites, groups))
                begin = max(begin, step)
    return sorted(parts, key=lambda one: (one.part.rank, one.part.part))


def by_hand(parts):
    """{group: {step: {(site, statistic): value or None}}}, and loss by step."""
    starts = {}
    for one in (one for one in parts if one.steps):
        resumed = one.part.resumed_at_step
        begin = min(one.steps[0], resumed) if resumed >= 0 else one.steps[0]
        starts[one.session] = min(begin, starts.get(one.session, begin))
    table, losses, cut = {}, {}, set()
    for one in parts:
        limit = min((begin for session, begin in starts.items() if session > one.session), default=math.inf)
        cut |= {(one.session, step) for step in one.steps if step >= limit}
        for step in (step for step in one.steps if step < limit):
            losses.setdefault(step, {})[one.part.rank] = one.part.rank + step / 7
            for group in (group for group in one.groups if recorded(one, group, step)):
                row = table.setdefault(group, {}).setdefault(step, {})
                row[one.part.rank] = one
    return table, losses, len(cut)


def world_of(parts, session):
    own = [one.part for one in parts if one.session == session]
    return max(*(part.world_size for part in own), len({part.rank for part in own}))


def expected(parts, group, row, step, site, statistic):
    """The value by its definition, None where it is unknown."""
    rule = RULES[statistic]
    session = next(iter(row.values())).session
    held = {rank: one for rank, one in row.items() if site in one.sites and is_seen(rank, one.part.part, step, site)}
    if group == "weights" or not rule:
        held = {min(held): held[min(held)]} if held else {}
        rule = "max"
    elif rule in {"sum", "root_sum_squares"} and len(row) < world_of(parts, session):
        return None
    numbers = [value(rank, one.part.part, step, site, statistic) for rank, one in held.items()]
    if not numbers:
        return None
    return {
        "sum": math.fsum,
        "max": max,
        "mean": lambda x: math.fsum(x) / len(x),
        "rms": lambda x: math.hypot(*x) / math.sqrt(len(x)),
        "root_sum_squares": lambda x: math.hypot(*x),
    }[rule](numbers)


@settings(max_examples=120, deadline=None)
@given(runs(), st.integers(0, 6), st.integers(0, 8), st.integers(0, 3), st.integers(0, 4))
def test_a_merged_run_is_what_dictionaries_make_of_its_parts(parts, start, stop, left, right):
    merged = Merged([Piece(source_of(one)) for one in parts])
    table, losses, cut = by_hand(parts)
    assert merged.steps(SCALARS).tolist() == sorted(losses)
    assert sum(session.rows_cut for session in merged.timeline.sessions) == cut
    for group in merged.layout.groups:
        rows = table.get(group.name, {})
        steps = sorted(rows)
        assert merged.steps(group.name).tolist() == steps
        paths = list(dict.fromkeys(p for one in by_session(parts) if group.name in one.groups for p in one.sites))
        assert sorted(site.path for site in group.sites) == sorted(paths)
        sites = slice(left, right)
        for name in RULES:
            found = merged.read(group.name, name, min(start, len(steps)), min(max(start, stop), len(steps)), sites)
            seen = merged.observed(group.name, min(start, len(steps)), min(max(start, stop), len(steps)), sites, name)
            for place, step in enumerate(steps[start : max(start, stop)]):
                for column, site in enumerate(group.sites[sites]):
                    wanted = expected(parts, group.name, rows[step], step, site.path, name)
                    assert seen[place, column] == (wanted is not None)
                    got = found[place, column]
                    assert math.isnan(got) if wanted is None else math.isclose(got, wanted, rel_tol=1e-12), (step, name)


def by_session(parts):
    return sorted(parts, key=lambda one: (one.session, one.part.rank, one.part.part))


def losses_of(parts, losses, session):
    """Ranks by step of a session, of the rows that count."""
    last = {step: max(one.session for one in parts if step in one.steps) for step in losses}
    return [losses[step] for step in losses if last[step] == session]


@settings(max_examples=60, deadline=None)
@given(runs())
def test_scalars_are_those_of_the_first_rank_that_logged_them_and_a_step_is_any_ranks(parts):
    merged = Merged([Piece(source_of(one)) for one in parts])
    _, losses, _ = by_hand(parts)
    found = merged.read(SCALARS, "loss", 0, len(losses))
    for place, step in enumerate(sorted(losses)):
        session = max(one.session for one in parts if step in one.steps)
        first = min(rank for ranks in losses_of(parts, losses, session) for rank in ranks)
        wanted = losses[step].get(first, math.nan)
        assert found[place] == wanted or (math.isnan(wanted) and math.isnan(found[place]))
    assert merged.read(SCALARS, "wall_time", 0, len(losses)).tolist() == [step / 4 for step in sorted(losses)]


@settings(max_examples=60, deadline=None)
@given(runs())
def test_absences_name_every_step_that_a_rank_missed(parts):
    merged = Merged([Piece(source_of(one)) for one in parts])
    _, losses, _ = by_hand(parts)
    missing = {}
    for step in sorted(losses):
        session = max(one.session for one in parts if step in one.steps)
        for rank in range(world_of(parts, session)):
            if rank not in losses[step]:
                missing.setdefault((session, rank), []).append(step)
    found = {(a.rank, a.steps, a.first, a.last) for a in merged.timeline.absences()}
    assert found == {(rank, len(steps), steps[0], steps[-1]) for (_, rank), steps in missing.items()}


def part(rank=0, world=1, number=0, session="a", resumed=-1, steps=range(4), sites=("a",), groups=("acts",)):
    info = PartInfo(rank, world, number, session, min(steps, default=0), resumed)
    return Drawn(info, 0, tuple(steps), tuple(sites), tuple(groups))


def test_one_part_is_read_without_being_copied_about():
    source = source_of(part())
    merged = Merged([Piece(source)])
    assert merged.layout is source.layout
    assert merged.steps("acts").tolist() == source.steps("acts").tolist()


def test_a_later_session_without_a_row_takes_nothing_away():
    first, later = part(steps=range(10)), part(number=1, session="b", resumed=3, steps=())
    merged = Merged([Piece(source_of(first)), Piece(source_of(later))])
    assert merged.steps(SCALARS).tolist() == list(range(10))


def test_a_resumed_session_cuts_from_where_it_went_on_even_before_its_first_recorded_row():
    first, later = part(steps=range(10)), part(number=1, session="b", resumed=3, steps=range(5, 7))
    merged = Merged([Piece(source_of(first)), Piece(source_of(later))])
    assert merged.steps(SCALARS).tolist() == [0, 1, 2, 5, 6]
    assert [session.rows_cut for session in merged.timeline.sessions] == [7, 0]


def test_steps_that_a_live_rank_has_not_reached_are_held_back():
    fast, slow = part(world=2, steps=range(10)), part(rank=1, world=2, steps=range(6))
    pieces = [Piece(source_of(fast)), Piece(source_of(slow))]
    assert Merged(pieces, live={0, 1}).steps(SCALARS).tolist() == list(range(6))
    assert Merged(pieces, live={0}).steps(SCALARS).tolist() == list(range(10))
    assert Merged(pieces, live={0}).timeline.absences()[0].steps == 4


def test_the_same_checkpoint_can_be_resumed_twice():
    sessions = [part(steps=range(8)), part(number=1, session="b", resumed=3, steps=range(3, 6)),
                part(number=2, session="c", resumed=3, steps=range(3, 5))]  # fmt: skip
    merged = Merged([Piece(source_of(one)) for one in sessions])
    assert merged.steps(SCALARS).tolist() == [0, 1, 2, 3, 4]
    assert [session.rows_cut for session in merged.timeline.sessions] == [5, 3, 0]


def test_sessions_of_ranks_without_a_common_id_match_by_where_they_went_on():
    parts = [
        part(0, 2, 0, "a0", -1, range(4)), part(0, 2, 1, "b0", 2, range(2, 6)),
        part(1, 2, 0, "a1", -1, range(4)), part(1, 2, 1, "b1", 2, range(2, 6)),
    ]  # fmt: skip
    merged = Merged([Piece(source_of(one)) for one in parts])
    assert merged.steps(SCALARS).tolist() == list(range(6))
    assert not merged.timeline.absences()
    assert [(session.rows, session.rows_cut) for session in merged.timeline.sessions] == [(2, 2), (4, 0)]


def test_statistics_with_other_axes_are_left_out_of_the_later_part():
    one, two = source_of(part()), source_of(part(number=1, steps=range(4, 6)))
    changed = StatisticSpec("total", "1", "total", ("bin",), {"bin": (1.0, 2.0)}, "sum")
    group = two.layout.groups[0]
    specs = tuple(changed if spec.name == "total" else spec for spec in group.statistics)
    other = MemoryWriter(replace(two.layout, groups=(replace(group, statistics=specs),)))
    other.append(Row(4, 1.0, {"acts": {"total": np.ones((1, 2)), "level": np.ones(1)}}))
    merged = Merged([Piece(one), Piece(other.run()._source)])
    rows = len(merged.steps("acts"))
    assert np.isnan(merged.read("acts", "total", rows - 1, rows)).all()
    assert merged.observed("acts", rows - 1, rows, name="level").all()
    assert not merged.observed("acts", rows - 1, rows, name="total").any()


@pytest.mark.parametrize(("created", "delay"), [("2026-01-01T00:01:00+00:00", 60.0), ("no time", 0.0)])
def test_time_counts_from_the_beginning_of_the_run(created, delay):
    one, two = source_of(part()), source_of(part(number=1, steps=range(4, 6)))
    two.layout = replace(two.layout, info=replace(two.layout.info, created_at=created))
    merged = Merged([Piece(one), Piece(two)])
    assert merged.read(SCALARS, "wall_time", 4, 6).tolist() == [1.0 + delay, 1.25 + delay]
