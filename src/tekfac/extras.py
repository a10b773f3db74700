"""Optional packages, asked for by name when something needs them. Importing tekfac needs torch alone."""

from __future__ import annotations

import importlib
from types import ModuleType

EXTRA_OF = {
    "scipy": "fisher",
    "numpy": "fisher",
    "safetensors": "fisher",
    "tqdm": "fisher",
    "matplotlib": "fisher",
    "sklearn": "fisher",
    "rich": "lab",
    "optuna": "lab",
    "tensorboard": "lab",
    "PIL": "lab",
}
"""The extra of tekfac that brings each package."""


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
        extra = EXTRA_OF[package]
        raise ImportError(
            f"{purpose} needs {package}, which is not installed. It comes with an extra of tekfac: "
            f"pip install 'tekfac[{extra}]', or, in a clone of it, pip install -e '.[{extra}]'."
        ) from error
