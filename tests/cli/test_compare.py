"""`keelscope compare` on models and runs, and the same size under other schemes."""

from __future__ import annotations

import json

SMALL = "?depth=8&width=16&heads=2"


def test_models_and_runs_side_by_side(keelscope, recorded):
    code, out, err = keelscope("compare", str(recorded / "keel.h5"), f"scheme:post_ln{SMALL}", "--json")
    assert (code, err) == (0, "")
    assert [run["title"] for run in json.loads(out)["runs"]] == ["keel", f"post_ln{SMALL}"]
    assert json.loads(out)["axis"] == "relative depth"


def test_like_a_run(keelscope, recorded):
    code, out, err = keelscope(
        "compare", "scheme:post_ln", "scheme:keel", "--like", str(recorded / "keel.h5"), "--json"
    )
    assert code == 0
    assert err.endswith("at depth 16, width 16, heads 2.\n")
    document = json.loads(out)
    assert document["axis"] == "depth"  # all three are equally deep
    assert [run["title"] for run in document["runs"]] == ["keel.h5", "post_ln", "scheme:keel"]
    assert [run["headline"] for run in document["runs"]][::2] == ["flat", "flat"]


def test_fail_on_names_those_that_fail(keelscope, recorded):
    run = str(recorded / "keel.h5")
    code, out, err = keelscope("compare", run, run, "--fail-on", "flat,exploding")
    assert code == 1
    assert err == "keelscope: --fail-on: keel.h5 (flat), keel.h5 (flat).\n"
    assert "keel.h5 (2)" in out
    assert keelscope("compare", run, run, "--fail-on", "exploding")[0] == 0
    assert keelscope("compare", run, run, "--fail-on", "explodes").code == 2


def test_like_a_model_and_own_sizes_win(keelscope):
    code, out, err = keelscope("compare", "scheme:keel?depth=4", "--like", f"scheme:pre_ln{SMALL}", "--json")
    assert code == 0
    assert "at depth 8, width 16, heads 2, vocabulary 256." in err
    assert [run["title"] for run in json.loads(out)["runs"]] == [f"pre_ln{SMALL}", "keel?depth=4"]
    assert json.loads(out)["axis"] == "relative depth"


def test_wrong_words_are_one_sentence(keelscope, recorded, folder):
    run = str(recorded / "keel.h5")
    for words, sentence in {
        (
            run,
            "--like",
            "scheme:keel",
        ): "--like gives its size to reference models, and none is named; add one, such as",
        ("scheme:keel", "--like", "missing"): "there is no run file missing, and it is no model either",
        ("keel", run): "there is no run file keel, and it is no model either",
        ("scheme:keal", "--like", run): "there is no scheme 'keal'; did you mean keel",
        ("scheme:keel?dept=4", "--like", run): "scheme keel has no option 'dept': did you mean 'depth'?",
        (
            "scheme:keel",
            "--like",
            "net.py:ready",
        ): "does not tell its width: it has no norms, and its config no width=.",
        ("scheme:keel",): "compare takes 2 to 8 runs or models, not 1; use keelscope report for one.",
    }.items():
        code, out, err = keelscope("compare", *words)
        assert (code, out) == (2, ""), words
        assert sentence in err, (words, err)
        assert "Traceback" not in err
