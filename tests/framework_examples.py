"""The examples for frameworks, as modules, and what their tests have in common."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tekfac import TEKFAC
from tekfac.layers.registry import is_norm
from training import assert_identical

EXAMPLES = Path(__file__).resolve().parent.parent / "examples"


def example(name: str, *, needs: str | None = None, extra: str = "") -> ModuleType:
    """An example, as a module; the test is skipped where the framework it needs is not installed."""
    if needs is not None:
        pytest.importorskip(needs, reason=f"needs {needs}: pip install 'tekfac[{extra}]'")
    if str(EXAMPLES) not in sys.path:
        sys.path.append(str(EXAMPLES))  # as when it is run: some share a module
    spec = importlib.util.spec_from_file_location(f"example_{name}", EXAMPLES / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def assert_same_end(model: nn.Module, optimizer: Any, other_model: nn.Module, other_optimizer: Any) -> None:
    """Two runs ended with the same weights, buffers, momenta, moments and random states, bit for bit."""
    assert_identical(model, other_model)
    assert_identical(unwrapped(optimizer), unwrapped(other_optimizer))


def unwrapped(optimizer: Any) -> TEKFAC:
    """The optimizer inside what a framework has wrapped around it."""
    while not isinstance(optimizer, TEKFAC):
        optimizer = optimizer.optimizer
    return optimizer


def without_curvature(model: nn.Module, optimizer: Any) -> set[str]:
    """Parameters of the model that are not preconditioned."""
    named = {name.removeprefix("_orig_mod.") for name, _ in model.named_parameters()}
    return named - {name.removeprefix("_orig_mod.") for name in unwrapped(optimizer).curvature.parameters}


def left_to_adamw(model: nn.Module) -> set[str]:
    """Parameters of norms, and biases of convolutions that are kept by frequencies: as they come."""
    norms = {name for name, module in model.named_modules() if is_norm(module)}
    named = {name for name, _ in model.named_parameters() if name.rpartition(".")[0] in norms}
    for name, module in model.named_modules():
        if isinstance(module, nn.Conv2d) and module.in_channels >= 8 and module.bias is not None:
            named.add(f"{name}.bias")
    return {name.removeprefix("_orig_mod.") for name in named}


def weights(model: nn.Module) -> Tensor:
    """All parameters, as one vector."""
    return torch.cat([parameter.detach().flatten() for parameter in model.parameters()])
