"""Names and objects as probes, groups, and a probe that is added by dropping one file."""

from __future__ import annotations

import shutil
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

from keelscope.errors import PluginWarning, ProbeError, UnknownNameError
from keelscope.probe import DEFAULT_PROBES, Probe, Tap, TensorProbe, available_probes, group_of, resolve_probes
from keelscope.statistics import KURTOSIS, MEAN, RMS

MINE = TensorProbe("mine", Tap.OUTPUT, (RMS,), optional=(MEAN, KURTOSIS))


def names(probes) -> list[str]:
    return [probe.name for probe in probes]


def test_default_is_every_installed_probe_of_the_default_groups():
    installed = available_probes()
    found = resolve_probes("default")
    assert {group_of(probe) for probe in found} <= set(DEFAULT_PROBES)
    wanted = {p.name for p in installed.values() if {group_of(p), p.name} & set(DEFAULT_PROBES) and p.statistics}
    assert set(names(found)) == wanted
    assert {"outputs", "gradients", "parameters", "parameter_gradients"} <= set(names(found))
    assert "updates" not in names(found)


def test_names_objects_and_both():
    assert names(resolve_probes("updates")) == ["updates"]
    assert resolve_probes(MINE) == (MINE,)
    assert names(resolve_probes(["gradients", MINE])) == ["gradients", "mine"]
    assert names(resolve_probes(["default", "gradients"])) == names(resolve_probes("default"))
    assert names(resolve_probes(iter(["outputs", "updates"]))) == ["outputs", "updates"]


def test_a_probe_of_optional_statistics_only_is_not_asked_for_in_vain():
    (probe,) = resolve_probes("clipped_gradients")
    assert [statistic.name for statistic in probe.statistics] == ["clipped_norm"]
    assert [p.name for p in resolve_probes("parameter_gradients")] == ["parameter_gradients"]


def test_optional_statistics():
    (outputs,) = resolve_probes("outputs+kurtosis")
    assert [s.name for s in outputs.statistics][-1] == "kurtosis"
    found = {probe.name: probe for probe in resolve_probes(["default", "outputs+kurtosis"])}
    assert "kurtosis" in [s.name for s in found["outputs"].statistics]
    assert "kurtosis" not in [s.name for s in available_probes()["outputs"].statistics]


@pytest.mark.parametrize(
    ("wanted", "error", "message"),
    [
        ("gradient", UnknownNameError, r"no probe is called 'gradient'; did you mean gradients"),
        ("zzz", UnknownNameError, r"no probe is called 'zzz'; did you mean \w+, "),
        (
            "gradients+kurtosis",
            UnknownNameError,
            r"probe 'gradients' has no optional statistic 'kurtosis'; it has none",
        ),
        (
            "outputs+kurtosis+skew",
            UnknownNameError,
            r"probe 'outputs' has no optional statistic 'skew'; it has kurtosis",
        ),
        ([TensorProbe], ProbeError, r"is not a probe|lacks"),
        ([None], ProbeError, r"None is not a probe: expected name, group"),
        (
            [MINE, TensorProbe("mine", Tap.OUTPUT, (MEAN,))],
            ProbeError,
            r"two probes are called 'mine'; give one of them",
        ),
        ([MINE, TensorProbe("b", Tap.OUTPUT, (RMS,), group="mine")], ProbeError, r"'mine' and 'b' both write mine/rms"),
    ],
)
def test_what_cannot_be_resolved(wanted, error, message):
    with pytest.raises(error, match=message):
        resolve_probes(wanted)


def test_asking_for_a_group_gives_all_its_probes(monkeypatch):
    a, b = (TensorProbe(name, Tap.OUTPUT, (s,), group="pair") for name, s in (("a", RMS), ("b", MEAN)))
    monkeypatch.setattr("keelscope.plugins.load", lambda _: [("x", a), ("x", b), ("x", object())])
    assert resolve_probes("pair") == (a, b)
    assert resolve_probes("a") == (a,)
    assert available_probes() == {"a": a, "b": b}


def test_a_broken_package_is_left_out(monkeypatch, tmp_path):
    info = tmp_path / "broken-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: broken\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[keelscope.probes]\nmine = broken_probes:PROBES\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.warns(PluginWarning, match=r"broken"):
        assert "gradients" in available_probes()


def test_protocol_needs_no_inheritance():
    assert isinstance(MINE, Probe)
    assert not isinstance(3, Probe)


DROPPED = '''
"""Share of entries below 0."""

import torch

from keelscope import Statistic, Tap, TensorProbe
from keelscope.statistics import additive

__all__ = ["NEGATIVES"]


def _signs_of(x):
    return torch.stack([torch.ones_like(x).sum(), (x < 0).sum()]).double()


NEGATIVES = TensorProbe(
    "negatives",
    Tap.OUTPUT,
    (
        Statistic(
            "negative_fraction",
            additive("signs", ("n", "negative"), _signs_of),
            lambda t: t["negative"] / t["n"],
            "1",
            "Share of entries below 0.",
        ),
    ),
)
'''

RECORD = """
import sys, warnings
warnings.simplefilter("error")
import torch, keelscope as ks
from keelscope.testing import check_probe
from keelscope.probe import available_probes
check_probe(available_probes()["negatives"])
model = torch.nn.Sequential(torch.nn.Linear(3, 5), torch.nn.Tanh(), torch.nn.Linear(5, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
x = torch.randn(16, 3)
with ks.watch(model, sys.argv[1], optimizer=optimizer, sites="all", probes=["default", "negatives"]) as watch:
    hidden = model[0](x)
    wanted = (hidden < 0).double().mean().item()
    model(x).sum().backward()
    optimizer.step()
print(wanted)
"""

READ = """
import sys, keelscope as ks
run = ks.open_run(sys.argv[1])
series = run["negatives/negative_fraction"]
assert "torch" not in sys.modules
print(series.of("0").values[0, 0], series.unit, series.doc)
"""


class TestOneFile:
    """Adding a statistic and a probe touches one file: a new one."""

    def check(self, python_path: list[Path], folder: Path) -> None:
        path = ":".join(map(str, python_path))
        run = folder / "run.h5"

        def python(code: str) -> str:
            done = subprocess.run(
                [sys.executable, "-c", code, run], capture_output=True, text=True, env={"PYTHONPATH": path}, check=False
            )
            assert done.returncode == 0, done.stderr
            return done.stdout

        wanted = float(python(RECORD))
        value, unit, doc = python(READ).split(maxsplit=2)
        assert float(value) == pytest.approx(wanted, rel=1e-12)
        assert 0 < wanted < 1
        assert (unit, doc.strip()) == ("1", "Share of entries below 0.")

    def packages(self) -> list[Path]:
        found = [Path(find_spec(name).origin).parent for name in ("keelscope", "keelscope_probes")]
        return [found[0].parent, found[1].parent]

    def test_dropped_among_the_built_in_ones(self, tmp_path):
        core, probes = self.packages()
        copied = tmp_path / "probes"
        shutil.copytree(probes / "keelscope_probes", copied / "keelscope_probes")
        (copied / "keelscope_probes" / "negatives.py").write_text(DROPPED)
        self.check([core, copied, probes.parent / "dashboards"], tmp_path)

    def test_in_a_package_of_its_own(self, tmp_path):
        site = tmp_path / "site"
        info = site / "mine-1.0.dist-info"
        info.mkdir(parents=True)
        (site / "mine.py").write_text(DROPPED)
        (info / "METADATA").write_text("Metadata-Version: 2.1\nName: mine\nVersion: 1.0\n")
        (info / "entry_points.txt").write_text("[keelscope.probes]\nmine = mine:NEGATIVES\n")
        core, probes = self.packages()
        self.check([site, core, probes, probes.parent / "dashboards"], tmp_path)
