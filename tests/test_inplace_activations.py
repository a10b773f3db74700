"""In-place operations around a layer change neither the training nor the statistics."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dense import METHODS, assert_close
from tekfac import EKFAC, TEKFAC
from tekfac.optim.natural_gradient import NaturalGradient
from training import assert_identical, backward, everything, images, saved_curvature, train, vectors

FISHERS = ("sampled", "empirical", "exact")


class Activated(nn.Module):
    """Conv, linear and logits, each followed by an activation that may work in place."""

    def __init__(self, in_place: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.conv, self.hidden, self.head = nn.Conv2d(1, 2, 3), nn.Linear(18, 4), nn.Linear(4, 3)
        self.in_place = in_place
        self.double()

    def forward(self, x: Tensor) -> Tensor:
        x = F.leaky_relu(self.conv(x), 0.2, inplace=self.in_place).flatten(1)
        x = self.hidden(x)
        x = x.mul_(0.5) if self.in_place else x * 0.5
        x = x.tanh_() if self.in_place else x.tanh()
        return F.leaky_relu(self.head(x), 0.3, inplace=self.in_place)


@pytest.mark.parametrize("fisher", FISHERS)
@pytest.mark.parametrize("method", METHODS)
def test_in_place_activations_train_as_the_others_do(method: type[NaturalGradient], fisher: Any) -> None:
    runs = []
    for in_place in (False, True):
        model = Activated(in_place)
        optimizer = method(
            model,
            lr=0.05,
            damping=0.1,
            interval_growth=None,
            factors_every=2,
            basis_every=2,
            fisher=fisher,
            seed=0,
        )
        train(model, optimizer, images(4))
        runs.append(everything(model, optimizer))
    assert_identical(*runs)
    assert set(saved_curvature(runs[0]["optimizer"])) == {"conv.weight", "hidden.weight", "head.weight"}


@pytest.mark.parametrize("fisher", FISHERS)
def test_logits_changed_in_place_by_the_loss_are_read_as_the_model_gave_them(fisher: Any) -> None:
    def cooled(logits: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(logits / 2, y)

    def cooled_in_place(logits: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(logits.div_(2), y)

    runs = []
    for loss in (cooled, cooled_in_place):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(5, 4), nn.Tanh(), nn.Linear(4, 3)).double()
        optimizer = TEKFAC(model, lr=0.05, fisher=fisher, seed=0)
        train(model, optimizer, vectors(1), loss)
        runs.append(everything(model, optimizer))
    assert_identical(*runs)


def test_a_residual_added_in_place_to_the_output_is_no_part_of_the_layer() -> None:
    class Residual(nn.Module):
        def __init__(self, in_place: bool) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.layer, self.head = nn.Linear(5, 5), nn.Linear(5, 3)
            self.in_place = in_place
            self.double()

        def forward(self, x: Tensor) -> Tensor:
            y = self.layer(x)
            if self.in_place:
                y += x
            else:
                y = y + x
            out: Tensor = self.head(y)
            return out

    blocks = []
    for in_place in (False, True):
        model = Residual(in_place)
        optimizer = EKFAC(model, fisher="exact")
        train(model, optimizer, vectors(1))
        blocks.append(optimizer.curvature["layer"].rescaling)
    assert_close(blocks[1], blocks[0])


def test_an_input_buffer_refilled_before_the_step_does_not_falsify_the_statistics() -> None:
    """Micro-batches that are copied into one buffer in turn."""
    data = vectors(2)

    def accumulated(reuse: bool) -> Any:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(5, 4), nn.Tanh(), nn.Linear(4, 3)).double()
        optimizer = TEKFAC(model, lr=0.05, fisher="exact")
        buffer = torch.empty_like(data[0][0])
        for x, y in data:
            backward(model, (buffer.copy_(x) if reuse else x, y))
        optimizer.step()
        return everything(model, optimizer)

    try:
        reused = accumulated(reuse=True)
    except RuntimeError as error:  # to refuse is as good
        assert "in place" in str(error).replace("-", " ")  # noqa: PT017
    else:
        assert_identical(reused, accumulated(reuse=False))
