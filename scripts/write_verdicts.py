"""Write docs/verdicts.md: how often verdicts are right, on the labelled benchmark (a minute on one core).

``python scripts/write_verdicts.py`` builds, records and judges every model. Tests compare each row with a fresh verdict
and the tables with the rows.
"""

from __future__ import annotations

import runpy
import sys
from pathlib import Path
from types import SimpleNamespace

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "verdicts.md"
BENCHMARK = SimpleNamespace(**runpy.run_path(str(ROOT / "tests" / "diagnosis" / "benchmark" / "collect.py")))

INTRODUCTION = """\
# How often verdicts are right

<!-- Written by scripts/write_verdicts.py from the labelled models in tests/diagnosis/benchmark. -->

{models} small models of known health are built, recorded over one step (or a few, where an illness needs time) and
judged as `keelscope report` does it. {healthy} are sound: reference schemes at several depths and initialisations,
plain and residual networks, convolutions, recurrent layers, and models of transformers, timm and torchvision. The
others have one fault: a bad initialisation, too much depth for their scheme, a detached or multiplied stream, closed
units, gates that cannot open, branches lost in bfloat16, NaN, Inf, overflow, parts that the loss does not reach, too
little to judge.

A label says how a model was built, and never what the tool said of it; where one can argue, the docstring of its
builder gives the reason. Label `healthy` leaves open whether a sound model is flat or drifting. The state `sick` with a
level headline is a fault that findings must name (a dead branch, a saturated gate), since the gradient passes it by.

Models are split by architecture and seed into a calibration half, on which alone thresholds may be set, and a test
half. Tests ask of both halves that every headline, every labelled finding and the sites it names are right, and that no
healthy model gets an error or a warning. Models of both halves were looked at while rules were mended, and labels that
did not hold of the model as built were corrected, so these figures are no estimate for models of other kinds; a slow
test repeats the benchmark at seeds that were not looked at (sound models at a second seed are left to slow tests, too).
Of two such repetitions one was without a mistake; in the other, three Llamas that happened to draw their padding token
first were called exploding: the stream of that token is 0, and each norm multiplies its gradient by 1/sqrt(epsilon).

Two further sets are an estimate. They were written without a look at the rules or at any verdict, of other
architectures and faults, with labels from how a model is built and from plain measurements, and were judged once:

| set | models | healthy | headline right | false alarms | `classic` right | its false alarms |
|---|---|---|---|---|---|---|
| `tests/diagnosis/unseen` | 150 | 77 | 147 (98.0 %) | 4 | 96 (64.0 %) | 61 |
| `tests/diagnosis/fresh`, after the first was mended | 113 | 68 | 110 (97.3 %) | 0 | 69 (61.1 %) | 47 |

Of the first, a BART was called vanishing across its cross-attention, a Swin of three stages too short to judge, and a
GPT-2 whose labels are all ignored dead instead of non-finite (both, now the latter); the false alarms were
the BART, experts that nobody chose, and the shortcuts of FNet and of a class attention. The kinds were mended. In the
second, three healthy models are said to be too short to judge. Five labels of sites did not allow for the module behind
the first bad one, which `nonfinite_backward` names, too, or for the rule `dead_units`, and were corrected.

Beside it stand the absolute thresholds of other tools, the rule set `classic` (`keelscope report --rules classic`). Its
word is the first that holds of: non-finite (ExplodingTensor), dead (all zero, 70 % zeros), exploding (gradients above
1e4 or 1e6, first over last weight above 70), vanishing (gradients below 1e-6 or 1e-7, first over last below 1e-3), else
level. It cannot say that there is too little data; level counts as right there.
"""


def page(rows: list[object]) -> str:
    """The whole page.

    Args:
        rows: one per model.

    Returns:
        Markdown.
    """
    whole = BENCHMARK.score(rows)
    parts = [INTRODUCTION.format(models=whole.models, healthy=whole.healthy), _scores(rows)]
    for half in ("test", "calibration"):
        some = [row for row in rows if row.half == half]
        parts += [f"## Label against headline: {half} half", BENCHMARK.confusion(some, "headline")]
        parts += [f"The same by `classic`, {half} half:", BENCHMARK.confusion(some, "classic")]
    return "\n\n".join([*parts, "## Every model", BENCHMARK.as_table(rows)]).replace("\n\n\n", "\n\n") + "\n"


def _scores(rows: list[object]) -> str:
    lines = ["| half | models | healthy | headline right | false alarms | `classic` right | its false alarms |"]
    lines.append("|---|---|---|---|---|---|---|")
    for half in ("calibration", "test"):
        s = BENCHMARK.score([row for row in rows if row.half == half])
        own = f"{s.right} ({100 * s.accuracy:.1f} %) | {s.alarmed}"
        other = f"{s.classic_right} ({100 * s.classic_right / s.models:.1f} %) | {s.classic_alarmed}"
        lines.append(f"| {half} | {s.models} | {s.healthy} | {own} | {other} |")
    lines += ["", "A false alarm is a healthy model with an error or a warning, whatever its headline."]
    return "\n".join(lines)


def _with_operators() -> None:
    """Operators that torchvision looks up when it is imported on a torch that it was not built for."""
    declare = runpy.run_path(str(ROOT / "tests" / "conftest.py"))["declare_operators"]
    declare()


if __name__ == "__main__":
    _with_operators()
    found = []
    for model in BENCHMARK.collect():
        outcome = BENCHMARK.outcome_of(model)
        sys.stderr.write("".join(f"{model.name}: {fault}\n" for fault in BENCHMARK.faults_of(model, outcome)))
        found.append(BENCHMARK.row_of(model, outcome))
    PAGE.write_text(page(found), encoding="utf-8")
