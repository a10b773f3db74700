"""Promise: torch.distributed.checkpoint saves and loads the optimizers like torch's own, bit for bit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict, set_optimizer_state_dict
from torch.nn.parallel import DataParallel

from dense import METHODS
from tekfac import TEKFAC
from tekfac.optim.natural_gradient import NaturalGradient
from training import assert_identical, cnn, copied, everything, images, train

DATA = images(7)
pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::UserWarning:torch")


def start(method: type[NaturalGradient], seed: int) -> tuple[nn.Module, NaturalGradient]:
    model = cnn(seed=seed)
    return model, method(model, lr=0.05, seed=seed, interval_growth=None, factors_every=2, basis_every=4)


@pytest.mark.parametrize("method", METHODS)
def test_a_state_goes_through_and_the_run_goes_on(method: type[NaturalGradient]) -> None:
    model, optimizer = start(method, 0)
    train(model, optimizer, DATA[:4])
    weights = copied(model.state_dict())
    saved = copied(get_optimizer_state_dict(model, optimizer))
    train(model, optimizer, DATA[4:])
    other, loaded = start(method, 1)
    other.load_state_dict(weights)
    set_optimizer_state_dict(other, loaded, saved)
    assert_identical(copied(get_optimizer_state_dict(other, loaded)), saved)
    train(other, loaded, DATA[4:])
    assert_identical(everything(other, loaded), everything(model, optimizer))


def test_frozen_parameters_of_which_nothing_is_loaded_are_there_afterwards() -> None:
    """torch hands on nothing of them; they may be trained later."""

    def begun(seed: int) -> tuple[nn.Module, NaturalGradient]:
        model = cnn(seed=seed)
        model[0].requires_grad_(False)
        return model, TEKFAC(model, lr=0.05, seed=seed, interval_growth=None, factors_every=2, basis_every=4)

    ends = []
    for resumes in (False, True):
        model, optimizer = begun(0)
        train(model, optimizer, DATA[:3])
        if resumes:
            weights = copied(model.state_dict())
            saved = copied(get_optimizer_state_dict(model, optimizer))
            model, optimizer = begun(1)
            model.load_state_dict(weights)
            set_optimizer_state_dict(model, optimizer, saved)
        train(model, optimizer, DATA[3:5])
        model[0].requires_grad_(True)
        train(model, optimizer, DATA[5:])
        ends.append(copied(model.state_dict()))
    assert_identical(*ends)


def test_a_state_goes_through_files(tmp_path: Path) -> None:
    model, optimizer = start(TEKFAC, 0)
    train(model, optimizer, DATA[:4])
    dcp.save({"optimizer": get_optimizer_state_dict(model, optimizer)}, checkpoint_id=tmp_path)
    other, loaded = start(TEKFAC, 1)
    train(other, loaded, DATA[4:5])  # so that there is a place for everything
    state: dict[str, Any] = {"optimizer": get_optimizer_state_dict(other, loaded)}
    dcp.load(state, checkpoint_id=tmp_path)
    set_optimizer_state_dict(other, loaded, state["optimizer"])
    assert_identical(loaded, optimizer)


def test_asking_a_new_optimizer_for_its_state_takes_no_step() -> None:
    """torch takes one, with zero gradients, where it finds no state at all."""
    model, optimizer = start(TEKFAC, 0)
    get_optimizer_state_dict(model, optimizer)
    assert optimizer.num_steps == 0
    other, plain = start(TEKFAC, 0)
    for own, its in ((model, optimizer), (other, plain)):
        train(own, its, DATA[:2])
    assert_identical(everything(model, optimizer), everything(other, plain))


def test_names_are_those_of_the_model_itself_whatever_is_wrapped_around_it() -> None:
    model = cnn()
    wrapped = TEKFAC(DataParallel(model), lr=0.05, seed=0)
    plain = TEKFAC(model, lr=0.05, seed=0)
    train(wrapped._model_layers.model, wrapped, DATA[:1])
    names = [group["param_names"] for group in wrapped.state_dict()["param_groups"]]
    assert names == [group["param_names"] for group in plain.state_dict()["param_groups"]]
    assert list(wrapped.curvature) == ["0", "4"]
    plain.load_state_dict(wrapped.state_dict())
    assert_identical(plain, wrapped)
