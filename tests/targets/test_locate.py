"""A target names an object; whatever is wrong with it is one sentence."""

from __future__ import annotations

import sys

import pytest

from keelscope.errors import FactoryError, TargetError
from keelscope.targets.locate import call, first_line, import_object, suggestion


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "neighbour_of_net.py").write_text("WIDTH = 3\n")
    (tmp_path / "net.py").write_text(
        "from neighbour_of_net import WIDTH\n"
        "def width():\n    import neighbour_of_net\n    return neighbour_of_net.WIDTH\n"
        "class Tools:\n    @staticmethod\n    def make():\n        return 'made'\n"
        "def broken():\n    raise ValueError('first\\nsecond')\n"
        "def leave():\n    raise SystemExit(3)\n"
    )
    return tmp_path


@pytest.mark.parametrize("place", ["net.py", "./net.py", "net"])
def test_file_and_module(folder, place):
    found = import_object(f"{place}:width", "factory")
    assert call(found, f"{place}:width") == 3
    sys.modules.pop("net", None)


def test_absolute_path_from_elsewhere(folder, tmp_path_factory, monkeypatch):
    monkeypatch.chdir(tmp_path_factory.mktemp("elsewhere"))
    target = f"{folder / 'net.py'}:width"
    assert call(import_object(target, "factory"), target) == 3


def test_attributes_of_attributes(folder):
    assert import_object("net.py:Tools.make", "factory")() == "made"


def test_search_path_is_left_as_it_was(folder):
    before = list(sys.path)
    target = "net.py:broken"
    found = import_object(target, "factory")
    with pytest.raises(FactoryError):
        call(found, target)
    assert sys.path == before


@pytest.mark.parametrize(
    ("target", "sentence"),
    [
        ("nte.py:width", "there is no file nte.py; did you mean net.py"),
        ("net.py:widht", "net.py:widht: no factory 'widht' there; did you mean width?"),
        ("net.py:Tools.nothing", "no factory 'nothing' there"),
        (
            "net.py",
            "'net.py' names no factory; write pkg.module:factory or path/file.py:factory; net.py defines width, ",
        ),
        ("nowhere_at_all:x", "there is no module nowhere_at_all; is it installed, or in the current folder?"),
        ("torch.nm:x", "there is no module torch.nm"),
        ("torch.lnalg:x", "there is no module torch.lnalg"),
        ("json.decoder.x:y", "there is no module json.decoder.x: json.decoder is a module, not a package."),
        ("collectoins:x", "there is no module collectoins; did you mean collections"),
        ("torch.nn:Linaer", "torch.nn:Linaer: no factory 'Linaer' there; did you mean Linear"),
    ],
)
def test_target_that_leads_nowhere(folder, target, sentence):
    with pytest.raises(TargetError) as caught:
        import_object(target, "factory")
    assert sentence in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("code", "reason"),
    [
        ("import not_installed_anywhere", "ModuleNotFoundError: No module named 'not_installed_anywhere'"),
        ("1 / 0", "ZeroDivisionError: division by zero"),
        ("def f(:", "SyntaxError"),
        ("raise SystemExit('usage: train.py')", "SystemExit: usage: train.py"),
    ],
)
def test_module_that_does_not_import(folder, code, reason):
    (folder / "bad_module.py").write_text(code + "\n")
    for target in ("bad_module.py:f", "bad_module:f"):
        with pytest.raises(FactoryError) as caught:
            import_object(target, "factory")
        assert f"raised {reason}" in str(caught.value)
        assert "--debug" in str(caught.value)
        assert caught.value.__cause__ is not None


def test_factory_that_raises_keeps_its_traceback(folder):
    target = "net.py:broken"
    found = import_object(target, "factory")
    with pytest.raises(FactoryError, match=r"net\.py:broken raised ValueError: first \(--debug") as caught:
        call(found, target)
    assert caught.value.__cause__.__traceback__.tb_next.tb_next is not None


def test_factory_that_exits(folder):
    target = "net.py:leave"
    found = import_object(target, "factory")
    with pytest.raises(FactoryError, match="raised SystemExit: 3"):
        call(found, target)


def test_words():
    assert first_line(ValueError("\n  a  \nb")) == "ValueError: a"
    assert first_line(KeyboardInterrupt()) == "KeyboardInterrupt"
    assert suggestion("lineer", ["linear", "relu"]) == "; did you mean linear?"
    assert suggestion("zzz", ["linear", "relu"]) == "; there is linear, relu"
    assert suggestion("zzz", [str(n) for n in range(20)]) == "; there is 0, 1, 2, 3, 4, 5, 6, 7, ..."
    assert suggestion("zzz", []) == ""
