"""How blocks were made, as plain values that are saved with them."""

from __future__ import annotations

import hashlib
from typing import Any

import torch
from torch import Tensor, nn

from tekfac.fisher.options import Options
from tekfac.likelihoods import Likelihood
from tekfac.version import __version__


def metadata_of(model: nn.Module, options: Options) -> dict[str, Any]:
    """The options that matter to the result, a hash of the model, and the versions."""
    return {
        "fisher": options.fisher,
        "likelihood": _in_words(options.likelihood),
        "loss_reduction": options.loss_reduction,
        "seed": options.seed,
        "model": fingerprint(model),
        "tekfac": __version__,
        "torch": torch.__version__,
    }


def _in_words(likelihood: object) -> str:
    """The same words in every process: no addresses."""
    if isinstance(likelihood, str):
        return likelihood
    if isinstance(likelihood, Likelihood):
        return repr(likelihood)
    return f"{getattr(likelihood, '__module__', '?')}.{getattr(likelihood, '__qualname__', '?')}"


def fingerprint(model: nn.Module) -> str:
    """A short hash of all parameters and buffers."""
    digest = hashlib.sha256()
    for name, tensor in sorted(model.state_dict().items()):
        if isinstance(tensor, Tensor):
            digest.update(name.encode())
            digest.update(tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()[:16]
