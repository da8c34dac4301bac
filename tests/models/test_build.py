from __future__ import annotations

import ast
import copy
import pickle
import sys
from pathlib import Path

import pytest
import torch

from keelscope import models
from keelscope.models import schemes

SMALL = {"depth": 4, "width": 16, "heads": 2}
TOKENS = torch.randint(256, (2, 8), generator=torch.Generator().manual_seed(0))


def test_the_stack_is_one_flat_list_of_one_class_with_the_depth_asked_for():
    model = models.build("keel", depth=6, width=16, heads=2)
    assert len(model.sublayers) == 6
    assert {type(sublayer) for sublayer in model.sublayers} == {models.SCHEMES["keel"]}
    assert type(model.sublayers[0]).residual_sublayers == 1
    kinds = [type(sublayer.branch).__name__ for sublayer in model.sublayers]
    assert kinds == ["Attention", "FeedForward"] * 3


def last_logits(positions, *batches):
    """Logits at the last position of a model with one attention branch."""
    model = models.build("pre_ln", depth=2, width=16, heads=2, positions=positions, context=8)
    return [model(torch.tensor([tokens]))[0, -1] for tokens in batches]


@pytest.mark.parametrize("positions", ["rotary", "learned"])
def test_positions_tell_orders_apart(positions):
    one, other = last_logits(positions, [1, 2, 3, 4], [3, 1, 2, 4])
    assert (one - other).abs().max() > 1e-3


def test_without_positions_the_order_of_earlier_tokens_is_unseen():
    torch.testing.assert_close(*last_logits("none", [1, 2, 3, 4], [3, 1, 2, 4]))


def test_learned_positions_are_drawn_after_everything_else_and_are_added_to_the_tokens():
    plain, learned = (
        models.build("post_ln", depth=2, width=16, heads=2, positions=p, context=8) for p in ("none", "learned")
    )
    table = learned.positions.weight
    assert table.shape == (8, 16)
    shared = plain.state_dict()
    assert all(torch.equal(learned.state_dict()[name], value) for name, value in shared.items())
    plain.embedding.register_forward_hook(lambda _, __, output: output + table[:3])
    tokens = torch.tensor([[5, 6, 7]])
    torch.testing.assert_close(learned(tokens), plain(tokens))


def test_more_positions_than_the_context_are_an_error():
    with pytest.raises(ValueError, match="9 positions are more than the model was built for: context = 8"):
        last_logits("learned", list(range(9)))


@pytest.mark.parametrize("scheme", models.SCHEMES)
def test_logits_have_one_row_per_position_and_every_parameter_gets_a_gradient(scheme):
    model = models.build(scheme, **SMALL, vocabulary=40)
    logits = model(TOKENS % 40)
    assert logits.shape == (2, 8, 40)
    logits.logsumexp(-1).sum().backward()
    assert [name for name, parameter in model.named_parameters() if parameter.grad is None] == []


@pytest.mark.parametrize("scheme", models.SCHEMES)
def test_no_position_sees_a_later_token(scheme):
    model = models.build(scheme, **SMALL)
    changed = TOKENS.clone()
    changed[:, 5:] = 255 - changed[:, 5:]
    before, after = model(TOKENS), model(changed)
    torch.testing.assert_close(before[:, :5], after[:, :5])
    assert (before[:, 5] - after[:, 5]).abs().max() > 1e-3


@pytest.mark.parametrize("scheme", models.SCHEMES)
def test_equal_seeds_give_equal_weights_and_leave_the_global_random_state_alone(scheme):
    torch.manual_seed(1)
    state = torch.get_rng_state()
    first = models.build(scheme, **SMALL, seed=3)
    torch.rand(3)
    second = models.build(scheme, **SMALL, seed=3)
    torch.set_rng_state(state)
    models.build(scheme, **SMALL, seed=4)
    assert torch.equal(torch.get_rng_state(), state)
    assert all(torch.equal(a, b) for a, b in zip(first.parameters(), second.parameters(), strict=True))
    assert not torch.equal(first.head.weight, models.build(scheme, **SMALL, seed=4).head.weight)


def test_schemes_start_from_the_same_matrices_and_a_deeper_model_continues_them():
    keel, post = models.build("keel", **SMALL), models.build("post_ln", **SMALL)
    deeper = models.build("post_ln", **{**SMALL, "depth": 8})
    for other in (post, deeper):
        assert torch.equal(keel.head.weight, other.head.weight)
        assert torch.equal(keel.sublayers[3].branch.output.weight, other.sublayers[3].branch.output.weight)


@pytest.mark.parametrize("scheme", models.SCHEMES)
def test_a_model_survives_copy_and_pickle(scheme):
    model = models.build(scheme, **SMALL)
    expected = model(TOKENS)
    assert torch.equal(copy.deepcopy(model)(TOKENS), expected)
    assert torch.equal(pickle.loads(pickle.dumps(model))(TOKENS), expected)


def test_a_thousand_sublayers_train_without_deep_recursion():
    model = models.build("keel", depth=1024, width=32)
    assert model.sublayers[-1].alpha == 1024
    limit = sys.getrecursionlimit()
    sys.setrecursionlimit(300)
    try:
        model(TOKENS[:1]).logsumexp(-1).sum().backward()
    finally:
        sys.setrecursionlimit(limit)
    assert model.embedding.weight.grad.abs().sum() > 0


def test_models_are_built_on_the_cpu_whatever_the_default_device():
    with torch.device("meta"):
        model = models.build("keel", **SMALL)
    assert model.head.weight.device.type == "cpu"


@pytest.mark.parametrize("final_norm", [True, False])
@pytest.mark.parametrize("scheme", ["keel", "post_ln", "pre_ln"])
def test_final_norm_is_an_option_of_every_scheme(scheme, final_norm):
    model = models.build(scheme, **SMALL, final_norm=final_norm)
    assert (model.closing is not None) == final_norm


def test_only_pre_ln_ends_in_a_norm_by_default():
    ends = {name: models.build(name, **SMALL).closing is not None for name in ("keel", "post_ln", "pre_ln")}
    assert ends == {"keel": False, "post_ln": False, "pre_ln": True}


@pytest.mark.parametrize(
    ("scheme", "options", "message"),
    [
        ("kel", {}, "there is no scheme 'kel': did you mean 'keel'?"),
        (7, {}, "there is no scheme 7: choose from "),
        ("keel", {"alfa": 2}, "scheme keel has no option 'alfa': did you mean 'alpha'?"),
        ("post_ln", {"alpha": 2}, "scheme post_ln has no option 'alpha': choose from "),
        ("keel", {"depth": 7}, "depth = 7 is odd: depth counts sub-layers"),
        ("keel", {"depth": 0}, "depth = 0 cannot be used: give a whole number, 2 or more"),
        ("keel", {"depth": "8"}, "depth = '8' cannot be used: give a whole number"),
        ("keel", {"depth": True}, "depth = True cannot be used: give a whole number"),
        (
            "keel",
            {"width": 20, "heads": 4},
            "width = 20 does not split into 4 heads of even size: give a multiple of 8",
        ),
        ("keel", {"vocabulary": 1}, "vocabulary = 1 cannot be used"),
        ("keel", {"norm": "rns"}, "norm = 'rns' is not known: did you mean 'rms'?"),
        ("keel", {"init": "normall"}, "init = 'normall' is not known: did you mean 'normal'?"),
        ("keel", {"feed_forward": "glu"}, "feed_forward = 'glu' is not known: did you mean "),
        ("keel", {"seed": -1}, "seed = -1 cannot be used: give a whole number, 0 or more"),
        ("keel", {"epsilon": -1e-5}, "epsilon = -1e-05 cannot be used: give 0 or a small positive number"),
        ("keel", {"dropout": 1.5}, "dropout = 1.5 cannot be used: give a number from 0 to 1"),
        ("keel", {"bias": "yes"}, "bias = 'yes' cannot be used: give True or False"),
        ("keel", {"final_norm": 1}, "final_norm = 1 cannot be used: give True or False"),
        ("keel", {"embedding_std": 0}, "embedding_std = 0 cannot be used: give a number above 0"),
        ("keel", {"alpha": -1}, "alpha = -1 cannot be used: give a number above 0"),
        ("keel", {"alpha_learnable": "no"}, "alpha_learnable = 'no' cannot be used: give True or False"),
        ("keel", {"first_block": "v3"}, "first_block = 'v3' is not known: choose from none, v1, v2"),
    ],
)
def test_what_cannot_be_built_is_said_in_one_sentence(scheme, options, message):
    with pytest.raises(ValueError, match=r".") as caught:
        models.build(scheme, **options)
    assert str(caught.value).startswith(message)
    assert "\n" not in str(caught.value)


NEW_SCHEME = '''
from keelscope.models.residual import SubLayer

class HalfResidual(SubLayer):
    """Half the stream and the branch.

    Equation:
        x <- x / 2 + s F(x)

    Args:
        place: Where the sub-layer stands.
        strength: Weight s of the branch.
    """

    name = "half_residual"

    def __init__(self, place, *, strength=1.0):
        super().__init__(place)
        self.strength = strength

    def forward(self, x):
        return x / 2 + self.strength * self.branch(x)
'''


def test_one_file_adds_a_scheme(tmp_path, monkeypatch):
    (tmp_path / "half_residual.py").write_text(NEW_SCHEME)
    monkeypatch.setattr(schemes, "__path__", [*schemes.__path__, str(tmp_path)])
    found = schemes.discover()
    monkeypatch.delitem(sys.modules, "keelscope.models.schemes.half_residual")
    assert set(found) - set(models.SCHEMES) == {"half_residual"}
    info = models.describe(found["half_residual"])
    assert (info.name, info.equation) == ("half_residual", "x <- x / 2 + s F(x)")
    assert info.options == (models.Option("strength", 1.0, "Weight s of the branch."),)
    model = models.build(found["half_residual"], **SMALL, strength=0.5)
    assert model.sublayers[3].strength == 0.5
    with pytest.raises(ValueError, match="scheme half_residual has no option 'strenght': did you mean 'strength'"):
        models.build(found["half_residual"], strenght=1.0)


def test_two_schemes_of_one_name_are_an_error(tmp_path, monkeypatch):
    (tmp_path / "again.py").write_text(NEW_SCHEME.replace("half_residual", "keel"))
    monkeypatch.setattr(schemes, "__path__", [*schemes.__path__, str(tmp_path)])
    with pytest.raises(ValueError, match="two schemes are called 'keel'"):
        schemes.discover()
    monkeypatch.delitem(sys.modules, "keelscope.models.schemes.again")


@pytest.mark.parametrize("scheme", models.SCHEMES)
def test_every_scheme_says_what_it_is(scheme):
    info = models.describe(models.SCHEMES[scheme])
    for text in (info.summary, info.equation, info.init, info.expect, info.source):
        assert len(text) > 3
    assert all(option.doc for option in info.options), [option.name for option in info.options if not option.doc]


def imported_names(path):
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        if isinstance(node, ast.ImportFrom):
            yield node.module


def test_models_import_nothing_of_keelscope_but_themselves():
    files = list(Path(models.__file__).parent.rglob("*.py"))
    assert len(files) > 15
    names = {name for path in files for name in imported_names(path) if name.split(".")[0] == "keelscope"}
    assert all(name.startswith("keelscope.models") for name in names), sorted(names)
