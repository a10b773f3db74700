"""Optional packages, asked for by name when something needs them. Importing tekfac needs torch alone."""

from __future__ import annotations

import importlib
from types import ModuleType

EXTRAS_OF = {
    "scipy": ("fisher", "lab"),
    "numpy": ("fisher", "lab"),
    "safetensors": ("fisher",),
    "matplotlib": ("fisher", "lab"),
    "sklearn": ("fisher", "lab"),
    "rich": ("fisher", "lab"),
    "jinja2": ("lab",),
    "pooch": ("lab",),
    "optuna": ("lab",),
    "tensorboard": ("lab",),
    "PIL": ("lab",),
    "pytorch_optimizer": ("bench",),
    "transformers": ("huggingface",),
}
"""The extras of tekfac that bring each package."""

USE_OF = {
    "fisher": "tekfac.fisher",
    "lab": "the lab",
    "bench": "the benchmark",
    "huggingface": "models of Hugging Face",
}


def require(module: str, purpose: str) -> ModuleType:
    """The module, imported now.

    Raises:
        ImportError: where it is not installed; the message names the extra that brings it.
    """
    package = module.partition(".")[0]
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        if error.name is None or error.name.partition(".")[0] != package:
            raise
        ways = [f"pip install 'tekfac[{extra}]' (for {USE_OF[extra]})" for extra in EXTRAS_OF[package]]
        raise ImportError(
            f"{purpose} needs {package}, which is not installed. It comes with an extra of tekfac: "
            f"{' or '.join(ways)}; in a clone of it, write -e '.[...]' instead."
        ) from error
