"""Promise: layers of Hugging Face's transformers that are known by name have the blocks they should have."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dense import assert_close, every_method
from tekfac import fisher
from tekfac.layers.kinds.huggingface import KINDS
from tekfac.layers.registry import has_own_forward, kind_of
from tekfac.optim.natural_gradient import NaturalGradient
from tekfac.optim.param_groups import parameters_of

pytest.importorskip("transformers", reason="needs pip install 'tekfac[huggingface]'")

SAMPLES, POSITIONS, WIDTH = 6, 5, 4


def found(name: str) -> type[nn.Module]:
    place, _, attribute = name.rpartition(".")
    return getattr(importlib.import_module(place), attribute)  # type: ignore[no-any-return]


MADE: dict[str, Callable[[type[nn.Module]], nn.Module]] = {
    "Conv1D": lambda kind: kind(WIDTH, WIDTH),
    "BartScaledWordEmbedding": lambda kind: kind(9, WIDTH, 1, embed_scale=3.0),
    "Gemma2TextScaledWordEmbedding": lambda kind: kind(9, WIDTH, 0, embed_scale=3.0),
    "Gemma3TextScaledWordEmbedding": lambda kind: kind(9, WIDTH, 0, embed_scale=3.0),
}


def layer_of(name: str) -> nn.Module:
    """A layer of that type, with random parameters."""
    kind = found(name)
    torch.manual_seed(0)
    layer = MADE.get(kind.__name__, lambda kind: kind(WIDTH))(kind).double()
    for parameter in layer.parameters():
        nn.init.normal_(parameter)
    return layer


class Model(nn.Module):
    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer, self.head = layer, nn.Linear(WIDTH, 3).double()

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.head(self.layer(x).tanh().mean(1))
        return out


def case(name: str) -> SimpleNamespace:
    model = Model(layer_of(name))
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(SAMPLES, POSITIONS, WIDTH, generator=generator, dtype=torch.float64)
    if isinstance(model.layer, nn.Embedding):
        x = torch.randint(9, (SAMPLES, POSITIONS), generator=generator)
    y = torch.arange(SAMPLES) % 3
    rows = []
    for n in range(SAMPLES):
        loss = F.cross_entropy(model(x[n : n + 1]), y[n : n + 1])
        gradients = torch.autograd.grad(loss, list(model.layer.parameters()))
        rows.append(torch.cat([gradient.reshape(-1) for gradient in gradients]))
    stacked = torch.stack(rows)
    return SimpleNamespace(model=model, batches=[(x, y)], fisher=stacked.mT @ stacked / SAMPLES)


@pytest.mark.parametrize("name", KINDS)
def test_a_name_is_that_of_a_type_and_gives_its_kind(name: str) -> None:
    layer = layer_of(name)
    assert kind_of(layer) is KINDS[name]
    assert not has_own_forward(layer)


@pytest.mark.parametrize("name", [name for name in KINDS if "Norm" not in name])
def test_its_exact_block_is_that_of_autograd(name: str) -> None:
    of = case(name)
    blocks = fisher.exact_blocks(of.model, of.batches, fisher="empirical", layers=["layer"])
    assert_close(blocks.to_dense(), of.fisher)


@every_method
@pytest.mark.parametrize("name", [name for name in KINDS if "Norm" in name])
def test_norms_are_exact_unit_by_unit(name: str, method: type[NaturalGradient]) -> None:
    of = case(name)
    chosen = method.__name__.lower()
    block = fisher.estimate(of.model, of.batches, method=chosen, fisher="empirical", layers=["layer"])
    assert_close(block.to_dense(), torch.diag(of.fisher.diagonal()), 1e-6)  # they compute in float32


@pytest.mark.parametrize("name", KINDS)
def test_all_norms_are_the_norms_among_them_too(name: str) -> None:
    layer = layer_of(name)
    left = parameters_of(Model(layer), ["all norms"], "first_order")
    assert left == (list(layer.parameters()) if "Norm" in type(layer).__name__ else [])
