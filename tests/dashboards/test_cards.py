"""The words of the page: every headline has its look, strings from files stay text, long lists stay bounded."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import get_args

import plotly
import pytest

from keelscope.diagnosis.finding import Severity
from keelscope.diagnosis.headline import Word
from keelscope_dashboards import cards, verdicts
from keelscope_dashboards.pages import OVERVIEW
from keelscope_dashboards.skeleton import skeleton
from keelscope_dashboards.state import RunState
from keelscope_dashboards.verdicts import TIMES, Figure, Note, Verdict, times

HOSTILE = '<img src=x onerror="alert(1)">'
NOTE = Note("shortcut_attenuated", "error", "It shrinks.", "Scale it.", "layers.3", 40)
STATE = RunState(
    id="ab12",
    name="keel",
    slot=0,
    status="finished",
    error="",
    revision=1,
    rows=4,
    head=30,
    planned=0,
    model="Keel",
    panels=("gradient",),
    verdict=Verdict("flat", "Level: x1, slope 0.", (Figure("Decades lost", "+0.01", "hint"),), (NOTE,)),
)


def as_json(component: object) -> str:
    return json.dumps(component, cls=plotly.utils.PlotlyJSONEncoder)


def test_every_headline_has_a_word_a_tone_and_an_icon() -> None:
    assert set(get_args(Word)) <= set(verdicts.WORDS)


def test_every_severity_has_a_look() -> None:
    assert {severity.label for severity in Severity} == set(cards.SEVERITIES)


def test_a_card_shows_verdict_sentence_and_numbers() -> None:
    text = as_json(cards.verdict_cards([STATE]))
    for piece in ("Flat", "Level: x1.", "Decades lost", "+0.01", "keel", "ab12"):
        assert piece in text


@pytest.mark.parametrize("headline", ["vanishing", "a word of a later version"])
def test_an_unknown_headline_is_shown_as_it_is(headline: str) -> None:
    state = replace(STATE, verdict=Verdict(headline, "s"))
    assert headline in as_json(cards.verdict_cards([state])).lower()


def test_strings_from_files_are_children_never_markup() -> None:
    state = replace(
        STATE, name=HOSTILE, model=HOSTILE, verdict=Verdict("flat", HOSTILE, (), (replace(NOTE, statement=HOSTILE),))
    )
    for component in (cards.run_list([state]), *cards.verdict_cards([state]), cards.findings([state])):
        assert HOSTILE in json.loads(as_json([component]).replace("\\n", ""))[0].__repr__()
        assert "dangerously" not in as_json(component)
        assert "Markdown" not in as_json(component)


def test_a_broken_file_is_a_card_with_its_sentence_and_no_button() -> None:
    state = replace(STATE, status="error", error="short.h5 is truncated.")
    (card,) = cards.verdict_cards([state])
    assert type(card).__name__ == "Div"
    assert "short.h5 is truncated." in as_json(card)


def test_findings_come_worst_first_and_say_where() -> None:
    notes = tuple(replace(NOTE, rule=f"rule_{level}", severity=level) for level in ("info", "error", "warning"))
    states = [replace(STATE, verdict=Verdict("flat", "s", (), notes))]
    rows = cards.findings(states).children
    assert [row.children[2].to_plotly_json()["props"]["data-rule"] for row in rows] == [
        "rule_error",
        "rule_warning",
        "rule_info",
    ]
    props = rows[0].children[2].to_plotly_json()["props"]
    assert (props["data-run"], props["data-site"], props["data-step"]) == ("ab12", "layers.3", "40")
    assert cards.findings_count(states) == "1 problem, 1 warning, 1 note"


def test_thousands_of_findings_stay_bounded() -> None:
    state = replace(STATE, verdict=Verdict("flat", "s", (), (NOTE,) * 5000))
    *rows, more = cards.findings([state]).children
    assert len(rows) == cards.MAX_FINDINGS
    assert more.children == f"{5000 - cards.MAX_FINDINGS:,} more; the page Diagnostics has those of the runs on show."
    assert cards.findings_count([state]) == "5000 problems"


def test_no_finding_is_said_and_so_is_waiting() -> None:
    quiet = replace(STATE, verdict=Verdict("flat", "s"))
    assert cards.findings([quiet]).children == "No rule has anything to say."
    assert cards.findings([replace(STATE, verdict=Verdict("pending", "s"))]).children == "Reading the runs."


@pytest.mark.parametrize(
    ("ratio", "text"), [(1.0, "1.00x"), (0.0123, "0.012x"), (9999.0, "9,999x"), (1e4, "10⁴"), (2.6e-9, "3x10⁻⁹")]
)
def test_ratios_are_short(ratio: float, text: str) -> None:
    assert times(ratio).replace(TIMES, "x") == text


def test_the_first_paint_holds_the_verdicts_and_escapes_everything() -> None:
    hostile = replace(STATE, name=HOSTILE, verdict=Verdict(HOSTILE, HOSTILE, (Figure(HOSTILE, HOSTILE, HOSTILE),)))
    broken = replace(STATE, status="error", error=HOSTILE, verdict=Verdict("error", HOSTILE))
    markup = skeleton([hostile, broken, STATE], HOSTILE, OVERVIEW)
    assert "<img" not in markup
    assert markup.count("&lt;img") == 7
    assert markup.count('class="card"') == 3
    assert "Flat" in markup
    assert "+0.01" in markup
