"""Names of a model's parameters and modules, whatever is wrapped around it."""

from __future__ import annotations

from collections.abc import Iterator

from torch import nn
from torch.nn.parallel import DataParallel, DistributedDataParallel

from tekfac.common.torch_internals import COMPILED_PREFIX, without_compiler


def named_parameters(model: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
    """As `model.named_parameters()`, with the names of the model itself."""
    prefix = _wrappers(model)[0]
    return ((_plain(name, prefix), parameter) for name, parameter in model.named_parameters())


def named_modules(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """As `model.named_modules()`, with the names of the model itself."""
    prefix = _wrappers(model)[0]
    return ((_plain(name, prefix), module) for name, module in model.named_modules())


def inside(module: str, name: str) -> str:
    """The name in the model of what has a name in a module, where either may be the model's own, ""."""
    return f"{module}.{name}" if module and name else module or name


def without_wrappers(model: nn.Module) -> nn.Module:
    """The model that torch.compile or a data-parallel module was given."""
    return _wrappers(model)[1]


def _wrappers(model: nn.Module) -> tuple[str, nn.Module]:
    """What wrappers put before all names of a model, and the model inside of them."""
    prefix = ""
    while True:
        inner = without_compiler(model)
        if inner is not model:
            prefix, model = prefix + COMPILED_PREFIX, inner
        elif isinstance(model, DataParallel | DistributedDataParallel):
            prefix, model = f"{prefix}module.", model.module
        else:
            return prefix, model


def _plain(name: str, prefix: str) -> str:
    """A name without the prefix, and without what compiled parts of the model add to it."""
    dotted = f"{name}." if name else ""
    inside = "" if prefix.startswith(dotted) else dotted.removeprefix(prefix)  # a wrapper is the model itself
    return inside.replace(COMPILED_PREFIX, "").removesuffix(".")
