"""How blocks were made, as plain values that are saved with them."""

from __future__ import annotations

import hashlib
from types import CodeType
from typing import Any

import torch
from torch import Tensor, nn

from tekfac.fisher.batch import hash_of
from tekfac.fisher.options import Options
from tekfac.likelihoods import Likelihood
from tekfac.version import __version__


def metadata_of(model: nn.Module, options: Options) -> dict[str, Any]:
    """The options that matter to the result, a hash of the model, and the versions."""
    return {
        "fisher": options.fisher,
        "likelihood": _in_words(options.likelihood),
        "loss": _in_words(options.loss),
        "outputs": _in_words(options.outputs),
        "loss_reduction": options.loss_reduction,
        "batch_dim": options.batch_dim,
        "seed": options.seed,
        "model": fingerprint(model),
        "tekfac": __version__,
        "torch": torch.__version__,
    }


def fingerprint(model: nn.Module) -> str:
    """A short hash of the structure of a model and of all its parameters and buffers."""
    digest = hashlib.sha256(repr(model).encode())
    for name, tensor in sorted(model.state_dict().items()):
        if isinstance(tensor, Tensor):
            digest.update(f"{name} {tensor.dtype} {hash_of(tensor)}".encode())
    return digest.hexdigest()[:16]


def _in_words(value: object) -> str | None:
    """The same words in every process, other words for other functions."""
    if value is None or isinstance(value, str):
        return value
    if isinstance(value, Likelihood):
        return repr(value)
    code = getattr(value, "__code__", None)
    name = f"{getattr(value, '__module__', '?')}.{getattr(value, '__qualname__', type(value).__qualname__)}"
    return name if code is None else f"{name}#{hashlib.sha256(_code(code)).hexdigest()[:8]}"


def _code(code: CodeType) -> bytes:
    """What a function does, without where it is."""
    constants = [_code(c) if isinstance(c, CodeType) else repr(c).encode() for c in code.co_consts]
    return b"|".join([code.co_code, " ".join(code.co_names).encode(), *constants])
