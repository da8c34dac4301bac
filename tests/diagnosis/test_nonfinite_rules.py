from __future__ import annotations

import numpy as np

from keelscope.diagnosis import Severity, diagnose
from keelscope.diagnosis.nonfinite import innermost
from keelscope.store.memory import MemoryWriter
from keelscope.store.schema import GroupSpec, Row, RunInfo, RunLayout, Site, StatisticSpec

PATHS = ("", "emb", "mid", "mid.log", "norm", "head")  # containers before their parts, as hooks see them start


def run_of(outputs, gradients, paths=PATHS, scalars=()):
    """`outputs` and `gradients`: per step the set of paths with a NaN."""
    sites = tuple(Site(path, "M", numel=4) for path in paths)
    specs = (StatisticSpec("rms", "1", ""), StatisticSpec("nonfinite_count", "1", ""))
    groups = tuple(GroupSpec(name, specs, sites) for name in ("outputs", "gradients"))
    writer = MemoryWriter(RunLayout(RunInfo("t", "id", "2026"), groups, ("skipped",) if scalars else ()))
    for k, bad in enumerate(zip(outputs, gradients, strict=True)):
        counts = [np.array([float(path in paths_) for path in paths]) for paths_ in bad]
        values = {
            g: {"rms": np.where(c > 0, np.nan, 1.0), "nonfinite_count": c}
            for g, c in zip(("outputs", "gradients"), counts, strict=True)
        }
        writer.append(Row(5 * k, 0.0, values, {"skipped": scalars[k]} if scalars else {}))
    return writer.run()


def test_the_first_producer_in_execution_order_is_named():
    run = run_of([set(), {"", "mid", "mid.log", "norm", "head"}], [set(), set(PATHS)])
    (finding,) = diagnose(run).findings
    assert (finding.rule, finding.severity, finding.sites) == ("nonfinite_forward", Severity.ERROR, ("mid.log",))
    assert finding.steps == (5, 5)
    assert finding.statement == (
        "The output of mid.log is the first with NaN or Inf in execution order, at step 5; 3 modules hold them on that "
        "step."
    )


def test_backward_names_where_the_gradient_turns_non_finite():
    (finding,) = diagnose(run_of([set()], [{"", "emb"}])).findings
    assert finding.rule == "nonfinite_backward"
    assert finding.sites == ("emb", "mid")
    assert finding.statement == (
        "The backward pass turns non-finite at the output of emb, after mid, whose output gradient is still finite, at "
        "step 0; outputs are finite on that step."
    )


def test_the_last_flagged_module_is_the_first_the_gradient_meets():
    (finding,) = diagnose(run_of([set()], [{"emb", "mid.log"}])).findings
    assert finding.sites == ("mid.log", "norm")


def test_at_the_top_nothing_finite_follows():
    (finding,) = diagnose(run_of([set()], [set(PATHS)])).findings
    assert finding.sites == ("head",)
    assert "after" not in finding.statement


def test_the_onset_counts_not_the_last_step():
    (finding,) = diagnose(run_of([set()] * 4, [set(), {"norm"}, {"norm", "mid.log"}, set()])).findings
    assert finding.sites == ("norm", "head")
    assert (finding.steps, finding.value) == ((5, 10), 2.0)


def test_steps_after_the_reported_one_are_not_seen():
    run = run_of([set()] * 3, [set(), set(), {"emb"}])
    assert diagnose(run, step=5).findings == ()


def test_a_non_finite_forward_explains_the_backward_of_its_step():
    run = run_of([{"head"}, set()], [{"head", "emb"}, {"emb"}])
    assert [f.rule for f in diagnose(run).findings] == ["nonfinite_forward", "nonfinite_backward"]
    assert diagnose(run).findings[1].statement.count("at step 5") == 1


def test_skipped_steps_do_not_count():
    skipped = diagnose(run_of([set()] * 2, [{"emb"}, set()], scalars=(1.0, 0.0))).findings
    assert [finding.rule for finding in skipped] == ["overflow_step_skipped"]


def test_finite_runs_have_no_finding():
    assert diagnose(run_of([set()], [set()])).findings == ()


def test_innermost_of_a_container_alone_is_the_container():
    assert innermost(["", "a", "a.b"], np.array([True, True, False])).tolist() == [1]
    assert innermost(["", "a"], np.array([True, False])).tolist() == [0]
