"""How blocks were made, as plain values that are saved with them."""

from __future__ import annotations

import functools
import hashlib
import inspect
import re
from collections.abc import Mapping
from types import CellType, CodeType
from typing import Any

import torch
from torch import Tensor, nn

from tekfac.common.data_hash import hash_of
from tekfac.fisher.options import Options
from tekfac.likelihoods import LIKELIHOODS, Custom, Likelihood
from tekfac.version import __version__

WITHOUT_EFFECT = ("layers", "memory_budget", "progress", "process_group", "loader_gives")
"""Options that a block does not depend on."""


def metadata_of(model: nn.Module, options: Options) -> dict[str, Any]:
    """The options that matter to the result, a hash of the model, and the versions."""
    chosen = {name: value for name, value in vars(options).items() if name not in WITHOUT_EFFECT}
    plain = {k: v if v is None or isinstance(v, int) else _in_words(v) for k, v in chosen.items()}
    return {**plain, "model": fingerprint(model), "tekfac": __version__, "torch": torch.__version__}


def in_words(likelihood: Likelihood) -> str:
    """A likelihood, by its name where it has one."""
    names = (name for name, own in LIKELIHOODS.items() if own == likelihood)
    return next(names, None) or _in_words(likelihood)


def fingerprint(model: nn.Module) -> str:
    """A short hash of what a model computes: its structure, its parameters and buffers, its modules' code."""
    digest = hashlib.sha256(_without_addresses(repr(model)).encode())
    for name, tensor in sorted(model.state_dict().items()):
        if isinstance(tensor, Tensor):
            digest.update(f"{name} {tensor.dtype} {hash_of(tensor)}".encode())
    for name, module in model.named_modules():
        plain = {key: value for key, value in vars(module).items() if _is_choice(key, value)}
        digest.update(f"{name} {_in_words(type(module).forward)} {_in_words(plain)}".encode())
    return digest.hexdigest()[:16]


def _is_choice(name: str, value: object) -> bool:
    """Whether an attribute of a module may change what it computes."""
    if name in ("training", "forward") or name.startswith("_"):
        return name == "forward"
    return callable(value) or isinstance(value, bool | int | float | str | type(None))


def _in_words(value: object) -> str:
    """The same words in every process, other words for other functions; containers by what they hold."""
    if isinstance(value, str):
        return value
    if isinstance(value, Mapping):
        return str({str(key): _in_words(part) for key, part in value.items()})
    if isinstance(value, tuple | list):
        return str([_in_words(part) for part in value])
    if isinstance(value, Custom):
        return f"Custom({_in_words(value.sampled_loss)})"
    if isinstance(value, Tensor):
        return f"tensor {hash_of(value)}"
    if isinstance(value, functools.partial):
        given = _in_words([value.args, value.keywords])
        return f"partial({_in_words(value.func)}, {given})"
    if inspect.ismethod(value):
        return f"{_in_words(value.__func__)} of {type(value.__self__).__qualname__}"
    if inspect.isfunction(value):
        cells = [cell.cell_contents for cell in value.__closure__ or () if cell != CellType()]
        parts = [value.__defaults__, value.__kwdefaults__, [c for c in cells if not isinstance(c, nn.Module)]]
        digest = hashlib.sha256(_code(value.__code__) + _in_words(parts).encode()).hexdigest()[:8]
        return f"{value.__module__}.{value.__qualname__}#{digest}"
    if callable(value) and not isinstance(value, type) and hasattr(value, "__dict__") and vars(value):
        return f"{type(value).__qualname__}({_in_words(vars(value))})"
    return _without_addresses(repr(value))


def _code(code: CodeType) -> bytes:
    """What a function does, without where it is."""
    constants = []
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            constants.append(_code(constant))
        else:  # a set has another order in every process
            plain = sorted(map(repr, constant)) if isinstance(constant, frozenset) else constant
            constants.append(repr(plain).encode())
    return b"|".join([code.co_code, " ".join(code.co_names).encode(), *constants])


def _without_addresses(text: str) -> str:
    return re.sub(r" at 0x[0-9a-f]+", "", text)
