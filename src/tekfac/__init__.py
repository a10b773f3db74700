"""Natural-gradient optimizers for PyTorch: KFAC, EKFAC, TKFAC and TEKFAC, and their Fisher approximations.

Names are imported when they are first asked for, so that what needs no torch, such as `tekfac --help`, does not
wait for it.
"""

from importlib import import_module
from typing import TYPE_CHECKING

from tekfac.version import __version__

__all__ = ["EKFAC", "KFAC", "TEKFAC", "TKFAC", "__version__", "explain", "fisher", "register_layer"]

if TYPE_CHECKING:
    from tekfac import damping as damping
    from tekfac import fisher
    from tekfac import guard as guard
    from tekfac import layers as layers
    from tekfac import likelihoods as likelihoods
    from tekfac import methods as methods
    from tekfac.explanation import explain
    from tekfac.layers.registry import register_layer
    from tekfac.optimizers import EKFAC, KFAC, TEKFAC, TKFAC
else:
    _MODULES = ("damping", "fisher", "guard", "layers", "likelihoods", "methods")
    _HOMES = {
        **dict.fromkeys(("EKFAC", "KFAC", "TEKFAC", "TKFAC"), "tekfac.optimizers"),
        "explain": "tekfac.explanation",
        "register_layer": "tekfac.layers.registry",
    }

    def __getattr__(name):
        if name in _MODULES:
            return import_module(f"tekfac.{name}")
        if name in _HOMES:
            value = globals()[name] = getattr(import_module(_HOMES[name]), name)
            return value
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")

    def __dir__():
        return sorted({*globals(), *_MODULES, *_HOMES})
