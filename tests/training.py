"""Small training runs for the tests: models, data, loops as a user writes them, and comparisons."""

from __future__ import annotations

import io
import itertools
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tekfac import TEKFAC
from tekfac.optim.natural_gradient import NaturalGradient

Batch = tuple[Tensor, Tensor]
Loss = Callable[[Tensor, Tensor], Tensor]


both_steps = pytest.mark.parametrize("step", ["adaptive", "natural"])
"""The default one, and the natural gradient proper."""


def maker(method: type[NaturalGradient], step: str) -> Callable[..., NaturalGradient]:
    """What makes an optimizer that takes such steps."""
    return method.natural if step == "natural" else method


def mlp(
    *, seed: int = 0, dtype: torch.dtype = torch.float64, sizes: Sequence[int] = (5, 4, 3)
) -> nn.Sequential:
    """Linear layers with tanh between them."""
    torch.manual_seed(seed)
    layers: list[nn.Module] = []
    for d_in, d_out in itertools.pairwise(sizes):
        layers += [nn.Linear(d_in, d_out), nn.Tanh()]
    return nn.Sequential(*layers[:-1]).to(dtype)


def cnn(*, seed: int = 0, dtype: torch.dtype = torch.float64) -> nn.Sequential:
    """A convolution, a batch norm, an in-place activation and a linear layer; images are 1 x 5 x 5."""
    torch.manual_seed(seed)
    return nn.Sequential(
        nn.Conv2d(1, 3, 3),
        nn.BatchNorm2d(3),
        nn.ReLU(inplace=True),
        nn.Flatten(),
        nn.Linear(27, 3),
    ).to(dtype)


def vectors(
    count: int,
    *,
    samples: int = 6,
    d_in: int = 5,
    classes: int = 3,
    seed: int = 1,
    dtype: torch.dtype = torch.float64,
) -> list[Batch]:
    """Batches of inputs [N, d_in] with labels."""
    return _data(count, (samples, d_in), classes, seed, dtype)


def images(count: int, *, samples: int = 6, seed: int = 1, dtype: torch.dtype = torch.float64) -> list[Batch]:
    """Batches of inputs [N, 1, 5, 5] with labels of three classes."""
    return _data(count, (samples, 1, 5, 5), 3, seed, dtype)


def _data(count: int, shape: tuple[int, ...], classes: int, seed: int, dtype: torch.dtype) -> list[Batch]:
    generator = torch.Generator().manual_seed(seed)
    return [
        (
            torch.randn(shape, generator=generator, dtype=dtype),
            torch.randint(classes, shape[:1], generator=generator),
        )
        for _ in range(count)
    ]


def train(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    batches: Iterable[Batch],
    loss: Loss = F.cross_entropy,
    scheduler: Any = None,
) -> None:
    """The loop of the README."""
    for x, y in batches:
        optimizer.zero_grad()
        loss(model(x), y).backward()
        optimizer.step()
        if scheduler is not None:
            scheduler.step()


def resumed(make: Callable[[], nn.Module], batches: Iterable[Batch], stop: int | None, **settings: Any) -> Any:
    """All after a step of TEKFAC on each batch; from `stop` on by another one, which is given the state."""
    model = make()
    optimizer = TEKFAC.natural(model, **settings)
    for step, batch in enumerate(batches):
        if step == stop:
            state, model_state = optimizer.state_dict(), model.state_dict()
            model = make()
            model.load_state_dict(model_state)
            optimizer = TEKFAC.natural(model, **{**settings, "seed": 99})
            optimizer.load_state_dict(state)
        train(model, optimizer, [batch])
    return everything(model, optimizer)


def backward(model: nn.Module, batch: Batch, loss: Loss = F.cross_entropy) -> Tensor:
    """Forward and backward pass; gives the loss."""
    x, y = batch
    value = loss(model(x), y)
    value.backward()
    return value.detach()


def through_a_file(value: Any) -> Any:
    """What comes back from torch.save and torch.load(weights_only=True)."""
    buffer = io.BytesIO()
    torch.save(value, buffer)
    buffer.seek(0)
    return torch.load(buffer, weights_only=True)


def saved_whole(state: Mapping[str, Any]) -> dict[str, Any]:
    """What an optimizer's state has of the optimizer as a whole: clocks, generator, ..."""
    return state["param_groups"][0]["tekfac"]  # type: ignore[no-any-return]


def saved_curvature(state: Mapping[str, Any]) -> dict[str, Any]:
    """The curvature in an optimizer's state, by the names of the weights it is found under."""
    names = [name for group in state["param_groups"] for name in group["param_names"]]
    return {names[i]: own["curvature"] for i, own in state["state"].items() if "curvature" in own}


def copied(state: Any) -> Any:
    """Nested dicts and lists with clones of their tensors."""
    if isinstance(state, Tensor):
        return state.detach().clone()
    if isinstance(state, Mapping):
        return {key: copied(value) for key, value in state.items()}
    if isinstance(state, list | tuple):
        return [copied(value) for value in state]
    return state


def differences(a: Any, b: Any, where: str = "") -> list[str]:
    """Where two nested states differ in even one bit."""
    if isinstance(a, Tensor) and isinstance(b, Tensor):
        same = a.dtype == b.dtype and a.shape == b.shape and torch.equal(a, b)
        return [] if same else [where]
    if isinstance(a, Mapping) and isinstance(b, Mapping):
        found = [f"{where}.{key} is on one side only" for key in sorted(map(str, set(a) ^ set(b)))]
        for key in a:
            if key in b:
                found += differences(a[key], b[key], f"{where}.{key}")
        return found
    if isinstance(a, list | tuple) and isinstance(b, list | tuple):
        found = [] if len(a) == len(b) else [f"{where}: {len(a)} and {len(b)} entries"]
        for index, (x, y) in enumerate(zip(a, b, strict=False)):
            found += differences(x, y, f"{where}[{index}]")
        return found
    return [] if type(a) is type(b) and a == b else [f"{where}: {a!r} and {b!r}"]


def assert_identical(a: Any, b: Any) -> None:
    """Nested states, modules or optimizers are the same bit for bit."""
    a, b = (v.state_dict() if isinstance(v, nn.Module | torch.optim.Optimizer) else v for v in (a, b))
    found = differences(a, b)
    assert not found, "differ: " + "; ".join(found)


def everything(model: nn.Module, optimizer: NaturalGradient) -> Any:
    """A copy of all parameters, buffers and optimizer state."""
    return copied({"model": model.state_dict(), "optimizer": optimizer.state_dict()})
