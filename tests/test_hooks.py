"""What module hooks see: every structure of inputs and outputs, in-place code, recomputation, copies, faulty probes."""

from __future__ import annotations

import copy
import dataclasses
import io
import math
import pickle
import subprocess
import sys
import warnings
from collections import namedtuple

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn.utils.rnn import pack_padded_sequence
from torch.utils.checkpoint import checkpoint

import keelscope as ks
from keelscope import kernel
from keelscope.errors import ProbeError, RecordingWarning
from keelscope.probe import Tap, TensorProbe
from keelscope.statistics import MEAN, MOMENTS, RMS, Statistic, additive

Pair = namedtuple("Pair", "first second")


@dataclasses.dataclass
class Output:
    hidden: torch.Tensor
    nothing: None = None
    count: int = 3


def norm(tensor: torch.Tensor) -> float:
    return tensor.double().norm().item()


def batch(*shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(7))


def recorded(model: nn.Module, run, **options) -> ks.Watch:
    """One step: `run(model)` gives the loss."""
    with ks.watch(model, sites="all", calls=True, **{"probes": ["default", "inputs"], **options}) as watch:
        run(model).backward()
        watch.step()
    return watch


STRUCTURES = {
    "tensor": (lambda h: h, lambda o: o, ""),
    "tuple": (lambda h: (h, torch.ones(2, dtype=torch.int64)), lambda o: o[0], "0"),
    "nested tuple": (lambda h: (None, (torch.arange(3), (h,))), lambda o: o[1][1][0], "1.1.0"),
    "list": (lambda h: [None, h], lambda o: o[1], "1"),
    "dict": (lambda h: {"ids": torch.arange(2), "h": h}, lambda o: o["h"], "h"),
    "dict of lists": (lambda h: {"h": [h]}, lambda o: o["h"][0], "h.0"),
    "namedtuple": (lambda h: Pair(None, h), lambda o: o.second, "1"),
    "dataclass": (Output, lambda o: o.hidden, "hidden"),
    "dataclass in a dict": (lambda h: {"o": Output(h)}, lambda o: o["o"].hidden, "o.hidden"),
}


class Wrapped(nn.Module):
    def __init__(self, kind: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.inner, self.head, self.kind = Returning(kind), nn.Linear(3, 1), kind

    def forward(self, x):
        output = self.inner(x)
        self.returned = output
        return self.head(torch.tanh(STRUCTURES[self.kind][1](output)))


class Returning(nn.Module):
    def __init__(self, kind: str) -> None:
        super().__init__()
        self.layer, self.kind = nn.Linear(4, 3), kind

    def forward(self, x):
        self.made = STRUCTURES[self.kind][0](self.layer(x))
        return self.made


@pytest.mark.parametrize("kind", STRUCTURES)
def test_structure_of_outputs(kind):
    """Every container gives the gradient of the tensor inside, and reaches its caller as the same object."""
    model = Wrapped(kind)

    def run(model):
        output = model(batch(5, 4)).square().sum()
        STRUCTURES[kind][1](model.returned).retain_grad()
        return output

    watch = recorded(model, run)
    hidden = STRUCTURES[kind][1](model.returned)
    assert model.returned is model.inner.made
    call = watch.calls["inner"][0]
    assert call.leaves == {STRUCTURES[kind][2]: (pytest.approx(norm(hidden.grad), rel=1e-6),)}
    assert call.outputs["count"] == 15
    assert call.outputs["mean"] == pytest.approx(hidden.double().mean().item(), rel=1e-5)
    series = watch.run["gradients/norm"]
    assert series.of("inner").values[0, 0] == series.of("inner.layer").values[0, 0]


def test_structures_of_libraries(operators):
    """ModelOutput of transformers and packed sequences of torch."""
    from transformers.modeling_outputs import BaseModelOutput

    class Library(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.lstm, self.head = nn.LSTM(4, 3, batch_first=True), Head()

        def forward(self, packed):
            output, _ = self.lstm(packed)
            output.data.retain_grad()
            self.data = output.data
            return self.head(output.data)

    class Head(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(3, 1)

        def forward(self, x):
            return BaseModelOutput(last_hidden_state=self.layer(x))

    packed = pack_padded_sequence(batch(3, 6, 4), [6, 3, 2], batch_first=True)
    model = Library()
    watch = recorded(model, lambda model: model(packed).last_hidden_state.square().sum())
    call = watch.calls["lstm"][0]
    assert call.outputs["count"] == 11 * 3, "the eleven real steps, not the padding"
    assert call.leaves["0.data"] == (pytest.approx(norm(model.data.grad), rel=1e-6),)
    assert list(watch.calls["head"][0].leaves) == ["last_hidden_state"]


def test_keyword_inputs():
    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(4, 4)

        def forward(self, *, mask, hidden):
            return self.layer(hidden) * mask

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.block = Block()

        def forward(self, x):
            return self.block(mask=torch.ones(4, dtype=torch.bool), hidden=x)

    x = batch(5, 4)
    watch = recorded(Model(), lambda model: model(x).sum())
    assert watch.calls["block"][0].inputs["variance"] == pytest.approx(x.double().var(correction=0).item(), rel=1e-6)


IN_PLACE = {
    "relu_": lambda h: h.relu_(),
    "+=": lambda h: h.__iadd__(1.0),
    "*=": lambda h: h.__imul__(0.5),
    "clamp_": lambda h: h.clamp_(-0.3, 0.3),
    "masked_fill_": lambda h: h.masked_fill_(h > 0.5, 0.0),
    "add itself": lambda h: h.add_(h.detach()),
    "dropout_": lambda h: nn.functional.dropout(h, 0.5, inplace=True),
}


class TestInPlace:
    """An in-place operation after a module leaves training alone, and the gradient is the one before the operation."""

    @pytest.mark.parametrize("operation", IN_PLACE)
    @pytest.mark.parametrize("shape", [(5, 4), (2, 5, 4), (2, 2, 5, 4)], ids=["2-D", "3-D", "4-D"])
    @pytest.mark.parametrize("bias", [True, False])
    def test_after_linear(self, operation, shape, bias):
        operate = IN_PLACE[operation]

        class Model(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                torch.manual_seed(0)
                self.first, self.second = nn.Linear(4, 3, bias=bias), nn.Linear(3, 1)

            def forward(self, x):
                torch.manual_seed(1)
                return self.second(operate(self.first(x)))

        def out_of_place(model, x):
            """The same mathematics, on a copy whose gradient torch keeps."""
            hidden = model.first(x)
            hidden.retain_grad()
            torch.manual_seed(1)
            model.second(operate(hidden.clone())).square().sum().backward()
            return hidden

        x = batch(*shape)
        model, oracle = Model(), Model()
        hidden = out_of_place(oracle, x)
        watch = recorded(model, lambda model: model(x).square().sum())
        assert watch.run["gradients/norm"].of("first").values[0, 0] == pytest.approx(norm(hidden.grad), rel=1e-5)
        assert watch.run["outputs/mean"].of("first").values[0, 0] == pytest.approx(
            hidden.detach().double().mean().item(), rel=1e-5
        )
        for got, wanted in zip(model.parameters(), oracle.parameters(), strict=True):
            assert torch.equal(got.grad, wanted.grad)
        if len(shape) == 3:
            late = hidden.grad[:, shape[1] // 2 :].double().norm(dim=-1)
            level = late[late > 0].log10().mean().item()
            got = watch.run["gradients/late_token_level"].of("first").values[0, 0]
            assert got == pytest.approx(level, rel=1e-5)

    def test_after_convolution_and_norm(self):
        torch.manual_seed(0)
        model = nn.Sequential(
            nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(inplace=True), nn.Flatten(), nn.Linear(64, 2)
        )
        twin = copy.deepcopy(model)
        twin[2].inplace = False
        kept = []
        twin[1].register_forward_hook(lambda _m, _a, output: (output.retain_grad(), kept.append(output))[2:] or None)
        x = batch(3, 3, 6, 6)
        twin(x).square().sum().backward()
        watch = recorded(model, lambda model: model(x).square().sum())
        assert watch.run["gradients/norm"].of("1").values[0, 0] == pytest.approx(norm(kept[0].grad), rel=1e-5)
        for got, wanted in zip(model.parameters(), twin.parameters(), strict=True):
            assert torch.equal(got.grad, wanted.grad)

    def test_transposed_view_of_a_linear(self):
        """The gradient has the shape of the output, although the hook sits on the flat tensor it is a view of."""

        class Swapped(nn.Linear):
            def forward(self, x):
                return super().forward(x).transpose(0, 1)

        torch.manual_seed(0)
        model = nn.Sequential(Swapped(4, 3), nn.Tanh())
        x = batch(2, 6, 4)

        def run(model):
            self.hidden = model[0](x)
            self.hidden.retain_grad()
            return model[1](self.hidden).square().sum()

        watch = recorded(model, run)
        late = self.hidden.grad[:, 1:].double().norm(dim=-1).log10().mean().item()
        assert watch.run["gradients/late_token_level"].of("0").values[0, 0] == pytest.approx(late, rel=1e-5)


class TestRepeatedCalls:
    def test_shared_module_merges_its_calls(self):
        class Shared(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                torch.manual_seed(0)
                self.block = nn.Linear(4, 4)

            def forward(self, x):
                self.outputs = []
                for _ in range(3):
                    x = torch.tanh(self.block(x))
                    self.outputs.append(x)
                return x

        model = Shared()

        def run(model):
            loss = model(batch(5, 4)).square().sum()
            for output in model.outputs:
                output.retain_grad()
            return loss

        watch = recorded(model, run)
        norms = [norm(o.grad * (1 - o.detach() ** 2)) for o in model.outputs]
        assert [call.leaves[""][0] for call in watch.calls["block"]] == pytest.approx(norms, rel=1e-5)
        got = watch.run["gradients/norm"].of("block").values[0, 0]
        assert got == pytest.approx(math.sqrt(sum(n * n for n in norms)), rel=1e-5)
        assert watch.gradients["block.weight"].per_backward == (pytest.approx(norm(model.block.weight.grad), rel=1e-6),)

    def test_two_backward_passes_through_one_forward(self):
        torch.manual_seed(0)
        model = nn.ModuleDict({"body": nn.Linear(4, 3), "a": nn.Linear(3, 1), "b": nn.Linear(3, 1)})
        with ks.watch(model, sites="all", calls=True) as watch:
            hidden = model["body"](batch(5, 4))
            hidden.retain_grad()
            model["a"](hidden).sum().backward(retain_graph=True)
            first = hidden.grad.clone()
            model["b"](hidden).square().sum().backward()
            watch.step()
        events = watch.calls["body"][0].leaves[""]
        assert events == pytest.approx([norm(first), norm(hidden.grad - first)], rel=1e-5)
        assert watch.run["parameter_gradients/norm"].of("body.weight").values[0, 0] == pytest.approx(
            norm(model["body"].weight.grad), rel=1e-6
        )

    def test_identity_and_the_same_object_twice(self):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(4, 4), nn.Identity(), nn.Dropout(0.0), nn.Linear(4, 1))
        watch = recorded(model, lambda model: model(batch(5, 4)).square().sum())
        values = watch.run["gradients/norm"]
        assert len({values.of(path).values[0, 0] for path in ("0", "1", "2")}) == 1
        assert all(len(watch.calls[path][0].leaves[""]) == 1 for path in ("0", "1", "2"))

    def test_a_module_that_calls_itself_keeps_its_inputs_apart(self):
        class Recursive(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                torch.manual_seed(0)
                self.layer = nn.Linear(4, 4)

            def forward(self, x, depth=2):
                return self.layer(x if depth == 0 else self(2 * x, depth - 1))

        x = batch(5, 4)
        watch = recorded(Recursive(), lambda model: model(x).sum())
        got = [call.inputs["max_abs"] for call in watch.calls[""]]
        largest = x.abs().max().item()
        assert got == pytest.approx([4 * largest, 2 * largest, largest], rel=1e-6), "the innermost call ends first"


class TestRecomputation:
    class Net(nn.Module):
        def __init__(self, mode: bool | None, *, shared: bool = False) -> None:
            super().__init__()
            torch.manual_seed(3)
            self.first, self.last = nn.Linear(4, 8), nn.Linear(8, 1)
            self.body = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Dropout(0.3), nn.Linear(8, 8), nn.LayerNorm(8))
            self.mode, self.repeats = mode, 2 if shared else 1

        def forward(self, x):
            hidden = self.first(x)
            for _ in range(self.repeats):
                hidden = (
                    self.body(hidden) if self.mode is None else checkpoint(self.body, hidden, use_reentrant=self.mode)
                )
            return self.last(hidden)

    @pytest.mark.parametrize("reentrant", [False, True])
    @pytest.mark.parametrize("shared", [False, True])
    @pytest.mark.parametrize("micro", [1, 2])
    def test_checkpointing_gives_the_same_numbers(self, reentrant, shared, micro):
        """As without checkpointing: statistics of each call once, gradients of every module inside."""

        def record(mode):
            model = self.Net(mode, shared=shared)
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            torch.manual_seed(0)
            with ks.watch(model, optimizer=optimizer, sites="all", probes=["default", "inputs"], calls=True) as watch:
                for step in range(3):
                    optimizer.zero_grad()
                    with torch.no_grad():
                        model.body(100 * torch.ones(5, 8))
                    for part in range(micro):
                        model(batch(5, 4) + step + part).square().mean().backward()
                    optimizer.step()
            return watch

        plain, recomputed = record(None), record(reentrant)
        assert plain.run.keys() == recomputed.run.keys()
        for key in set(plain.run.keys()) - {"scalars/watch_ms", "scalars/wall_time"}:
            a, b = plain.run[key], recomputed.run[key]
            assert [site.path for site in a.sites] == [site.path for site in b.sites]
            np.testing.assert_allclose(b.values, a.values, rtol=1e-5, atol=1e-7, err_msg=key)
        assert {path: len(calls) for path, calls in recomputed.calls.items()} == {
            path: len(calls) for path, calls in plain.calls.items()
        }
        assert {e.path: e.status for e in plain.coverage} == {e.path: e.status for e in recomputed.coverage}

    def test_reentrant_checkpointing_turned_on_later(self):
        """Its first step goes without the inside of the region, the following ones do not."""
        model = self.Net(None)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        with ks.watch(model, optimizer=optimizer, sites="all") as watch:
            for step in range(5):
                model.mode = True if step >= 2 else None
                with torch.no_grad():
                    model.body(batch(5, 8))
                model(batch(5, 4)).square().mean().backward()
                optimizer.step()
        inside = np.isfinite(watch.run["gradients/norm"].of("body.3").values[:, 0])
        assert inside.tolist() == [True, True, False, True, True]
        assert np.isfinite(watch.run["gradients/norm"].of("last").values).all()

    def test_calls_of_a_shared_checkpointed_block_keep_their_order(self):
        def events(mode):
            model = self.Net(mode, shared=True).eval()
            with ks.watch(model, sites="all", calls=True) as watch:
                model(batch(5, 4)).square().mean().backward()
                watch.step()
            return [call.leaves[""] for call in watch.calls["body.0"]]

        for mode in (False, True):
            np.testing.assert_allclose(events(mode), events(None), rtol=1e-5)


class TestLeafOutputs:
    """A module whose output outlives the step: hooks on it do not pile up."""

    class Table(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(3))

        def forward(self):
            return self.weight

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table, self.same = TestLeafOutputs.Table(), nn.Identity()

        def forward(self, x):
            return (self.same(x) * self.table()).sum()

    @pytest.mark.parametrize("every", [1, 2])
    def test_parameter_as_output(self, every):
        model, x = self.Model(), torch.ones(2, 3, requires_grad=True)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        with ks.watch(model, optimizer=optimizer, every=every, sites="all") as watch:
            counts = []
            for _ in range(6):
                optimizer.zero_grad()
                loss = model(x)
                counts.append(len(model.table.weight._backward_hooks or {}) + len(x._backward_hooks or {}))
                loss.backward()
                optimizer.step()
        marks = int(every > 1 and kernel.is_compiled())  # of the parameter, gone with the others
        assert counts[::every] == [2 + marks] * len(counts[::every])
        assert not any(counts[1::every] if every > 1 else ())
        assert not model.table.weight._backward_hooks
        assert not x._backward_hooks
        values = watch.run["gradients/norm"].of("table").values[:, 0]
        np.testing.assert_allclose(values, math.sqrt(12), rtol=1e-6)


class TestCopies:
    """A copy, pickle or checkpoint made while hooks are on records nothing and needs no keelscope."""

    def model(self) -> nn.Sequential:
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 1))

    def test_copies_do_not_record(self):
        model = self.model()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        x = batch(5, 4)
        with ks.watch(model, optimizer=optimizer, sites="all", probes=["default", "inputs"], calls=True) as watch:
            for _ in range(2):
                loss = model(x).square().sum()
                stream = io.BytesIO()
                torch.save(model, stream)
                stream.seek(0)
                copies = [
                    copy.deepcopy(model),
                    pickle.loads(pickle.dumps(model)),
                    torch.load(stream, weights_only=False),
                ]
                for copied in copies:
                    copied(100 * x).square().sum().backward()
                loss.backward()
                optimizer.step()
        assert {len(calls) for calls in watch.calls.values()} == {1}
        for copied in copies:
            copied.load_state_dict(model.state_dict())
            assert torch.equal(copied(x), model(x))
        assert np.nanmax(watch.run["inputs/max_abs"].of("0").values) < 10

    def test_optimizer_and_state_copies(self):
        model = self.model()
        optimizer = torch.optim.AdamW(model.parameters())
        with ks.watch(model, optimizer=optimizer):
            model(batch(5, 4)).sum().backward()
            optimizer.step()
            assert torch.load(self.saved(model.state_dict()), weights_only=True).keys() == model.state_dict().keys()
            assert torch.load(self.saved(optimizer.state_dict()), weights_only=True).keys() == {"state", "param_groups"}
            assert not copy.deepcopy(optimizer)._optimizer_step_pre_hooks

    def saved(self, thing) -> io.BytesIO:
        stream = io.BytesIO()
        torch.save(thing, stream)
        stream.seek(0)
        return stream

    def test_copy_loads_where_keelscope_is_not_importable(self, tmp_path):
        model = self.model()
        with ks.watch(model, sites="all", probes=["default", "inputs"]):
            loss = model(batch(5, 4)).sum()
            torch.save(model, tmp_path / "model.pt")
            wanted = model(torch.ones(1, 4)).item()
            loss.backward()
        code = f"""
import sys
class Absent:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0].startswith("keelscope"):
            raise ModuleNotFoundError(name)
sys.meta_path.insert(0, Absent())
import torch
model = torch.load({str(tmp_path / "model.pt")!r}, weights_only=False)
print(model(torch.ones(1, 4)).item())
"""
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
        assert float(done.stdout) == wanted


class TestFaultyProbes:
    """One warning; the values of that probe are missing and nothing else is."""

    def _raises(self, *_):
        raise ValueError("no such head")

    def faulty(self, how: str) -> TensorProbe:
        wrong_shape = additive("wrong", ("a",), lambda x: x.double().reshape(-1)[:2])
        not_a_tensor = additive("wrong", ("a",), lambda _: 3.0)
        statistic = {
            "shape of terms": Statistic("s", wrong_shape, lambda t: t["a"], "1", "Wrong."),
            "type of terms": Statistic("s", not_a_tensor, lambda t: t["a"], "1", "Wrong."),
            "finish": Statistic("s", MOMENTS, lambda t: t["median"], "1", "Wrong."),
        }.get(how, RMS)
        tap = {"view of parameters": Tap.PARAMETER, "view of updates": Tap.UPDATE}.get(how, Tap.OUTPUT)
        views = self._raises if how.startswith("view") else lambda tensors, _: tensors
        if how == "fits":
            return TensorProbe("faulty", tap, (statistic,), chooses=self._raises)
        return TensorProbe("faulty", tap, (statistic,), views=views)

    @pytest.mark.parametrize(
        "how", ["fits", "view", "view of parameters", "view of updates", "shape of terms", "type of terms", "finish"]
    )
    def test_one_warning_and_nothing_else_is_lost(self, how):
        def train(probes) -> tuple[ks.Watch, list[torch.Tensor]]:
            torch.manual_seed(0)
            model = nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.2), nn.Linear(4, 1))
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            with ks.watch(model, optimizer=optimizer, sites="all", probes=probes) as watch:
                for _ in range(3):
                    optimizer.zero_grad()
                    model(batch(5, 4)).square().sum().backward()
                    optimizer.step()
            return watch, list(model.parameters())

        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            watch, weights = train([self.faulty(how), "default", "updates"])
        assert [w.category for w in caught] == [RecordingWarning]
        assert "Probe 'faulty' failed and its values are missing; training is not affected" in str(caught[0].message)
        clean, clean_weights = train(["default", "updates"])
        assert all(torch.equal(a, b) for a, b in zip(weights, clean_weights, strict=True))
        for key in set(clean.run.keys()) - {"scalars/watch_ms", "scalars/wall_time"}:
            np.testing.assert_array_equal(watch.run[key].values, clean.run[key].values, err_msg=key)
        faulty = watch.run.get(f"faulty/{'s' if how in ('shape of terms', 'type of terms', 'finish') else 'rms'}")
        assert faulty is None or np.isnan(faulty.values).all()

    def test_a_probe_that_looks_at_weights_keeps_no_graph(self):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 1))
        probe = TensorProbe("own", Tap.OUTPUT, (RMS,), views=lambda _, owner: (owner.weight,), chooses=is_linear)
        watch = recorded(model, lambda model: model(batch(5, 4)).sum(), probes=[probe, "gradients"])
        wanted = [p.double().square().mean().sqrt().item() for p in (model[0].weight, model[1].weight)]
        np.testing.assert_allclose(watch.run["own/rms"].values[0], wanted, rtol=1e-6)

    def test_several_probes_of_one_tap(self):
        """Calls hold the statistics of every probe, also of one that fits few modules or is not due."""
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 1))
        few = TensorProbe("few", Tap.OUTPUT, (RMS,), chooses=lambda module: isinstance(module, nn.ReLU))
        rare = TensorProbe("rare", Tap.OUTPUT, (MEAN,), every=2)
        with ks.watch(model, sites="all", probes=[few, rare, "gradients"], calls=True) as watch:
            for step in range(3):
                model(batch(5, 4)).sum().backward()
                watch.step()
                call = watch.calls["1"][0]
                assert "rms" in call.outputs
                assert ("mean" in call.outputs) == (step % 2 == 0)
                assert "rms" not in watch.calls["0"][0].outputs
        assert [site.path for site in watch.run["few/rms"].sites] == ["1"]
        assert watch.run["rare/mean"].steps.tolist() == [0, 2]
        assert watch.run["few/rms"].steps.tolist() == [0, 1, 2]

    def test_groups(self):
        """Probes may share a group on one axis; a statistic has one writer."""
        a = TensorProbe("a", Tap.OUTPUT, (RMS,), group="g", every=2)
        b = TensorProbe("b", Tap.OUTPUT_GRADIENT, (MEAN,), group="g")
        model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 1))
        with ks.watch(model, sites="all", probes=[a, b]) as watch:
            for _ in range(2):
                model(batch(5, 4)).sum().backward()
                watch.step()
        assert np.isnan(watch.run["g/rms"].values[1]).all()
        assert np.isfinite(watch.run["g/mean"].values).all()
        with pytest.raises(ProbeError, match=r"'a' and 'c' both write g/rms; give one of them another group"):
            ks.watch(model, probes=[a, TensorProbe("c", Tap.OUTPUT, (RMS,), group="g")])
        with pytest.raises(ProbeError, match=r"share the group 'g', but one observes modules and the other parameters"):
            ks.watch(model, probes=[a, TensorProbe("c", Tap.PARAMETER, (MEAN,), group="g")])
        with pytest.raises(ProbeError, match=r"two probes are called 'a'"):
            ks.watch(model, probes=[a, TensorProbe("a", Tap.OUTPUT, (MEAN,))])


def is_linear(module: nn.Module) -> bool:
    return isinstance(module, nn.Linear)


class TestOddCalls:
    def test_functional_transforms_go_on_and_are_said_to_be_lost(self):
        from torch.func import functional_call, grad, vmap

        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1))
        parameters = {name: p.detach() for name, p in model.named_parameters()}

        def per_sample() -> torch.Tensor:
            each = vmap(grad(lambda p, x: functional_call(model, p, (x[None],)).square().sum()), in_dims=(None, 0))
            return each(parameters, batch(5, 3))["0.weight"]

        wanted = per_sample()
        with ks.watch(model, sites="all") as watch:
            got = per_sample()
        assert torch.equal(got, wanted)
        reasons = {entry.path: entry.reason for entry in watch.coverage if entry.what == "module"}
        assert "functorch transform" in reasons["0"]

    def test_tracing_and_export(self):
        """What compilers run to look at the model is no call."""
        model = nn.Sequential(nn.Linear(3, 4), nn.ReLU())
        with ks.watch(model, sites="all", probes=["default", "inputs"], calls=True) as watch:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", DeprecationWarning)
                traced = torch.jit.trace(model, torch.ones(2, 3), check_trace=False)
            torch.fx.symbolic_trace(model)
            exported = torch.export.export(model, (torch.ones(2, 3),)).module()
            model(batch(2, 3)).sum().backward()
            watch.step()
        assert torch.equal(traced(torch.ones(2, 3)), model(torch.ones(2, 3)))
        assert torch.equal(exported(torch.ones(2, 3)), model(torch.ones(2, 3)))
        assert {path: len(calls) for path, calls in watch.calls.items()} == {"": 1, "0": 1, "1": 1}
        assert np.isfinite(watch.run["gradients/norm"].of("0").values).all()

    def test_fake_tensors_are_no_values_and_leave_nothing_behind(self):
        """A size that is first seen under a mode that makes fake tensors is an ordinary number afterwards."""
        from torch._subclasses.fake_tensor import FakeTensorMode

        model = nn.Sequential(nn.Linear(3, 17), nn.LayerNorm(17), nn.Linear(17, 1))
        with ks.watch(model, sites="all", probes=["default", "inputs"]) as watch:
            with FakeTensorMode(allow_non_fake_inputs=True) as mode:
                model(mode.from_tensor(torch.ones(2, 3)))
            model(batch(2, 3)).sum().backward()
            watch.step()
        wanted = model(batch(2, 3)).mean().item()
        assert watch.run["outputs/mean"].of("2").values[0, 0] == pytest.approx(wanted, rel=1e-6)
        assert np.isfinite(watch.run["norms/jacobian_gain"].values).all()

    def test_inference_mode(self):
        model = nn.Sequential(nn.Linear(3, 19), nn.LayerNorm(19), nn.Linear(19, 1))
        with ks.watch(model, sites="all", probes=["default", "inputs"]) as watch:
            with torch.inference_mode():
                model(100 * batch(2, 3))
            model(batch(2, 3)).sum().backward()
            watch.step()
        assert watch.run["inputs/max_abs"].of("0").values[0, 0] < 10
        assert np.isfinite(watch.run["norms/measured_gain"].values).all()

    def test_scripted_module_takes_no_hooks_and_says_so(self):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)
            scripted = torch.jit.script(nn.Linear(4, 4))
        model = nn.Sequential(nn.Linear(3, 4), scripted, nn.Linear(4, 1))
        watch = recorded(model, lambda model: model(batch(2, 3)).sum())
        statuses = {entry.path: entry.status for entry in watch.coverage}
        assert statuses["0"] == statuses["2"] == "observed"
        assert statuses["1"] in {"observed", "not_observed"}

    def test_empty_batch(self):
        model = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 1))
        watch = recorded(model, lambda model: model(torch.empty(0, 3)).sum())
        assert np.isnan(watch.run["outputs/mean"].values).all()
        assert watch.run["parameter_gradients/norm"].values.tolist() == [[0, 0, 0, 0]]

    def test_second_derivatives(self):
        """A gradient penalty: the inner pass records no parameter gradient, and nothing grows."""
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        wanted = []
        with ks.watch(model, optimizer=optimizer, sites="all") as watch:
            for _ in range(3):
                optimizer.zero_grad()
                x = batch(5, 3).requires_grad_()
                (inner,) = torch.autograd.grad(model(x).sum(), x, create_graph=True)
                (inner.square().sum() + model(x).square().sum()).backward()
                wanted.append([norm(p.grad) for p in model.parameters()])
                optimizer.step()
        np.testing.assert_allclose(watch.run["parameter_gradients/norm"].values, wanted, rtol=1e-6)
