"""Natural-gradient optimizers for PyTorch: KFAC, EKFAC, TKFAC and TEKFAC, and their Fisher approximations."""

from tekfac import fisher
from tekfac.explanation import explain
from tekfac.layers.registry import register_layer
from tekfac.optimizers import EKFAC, KFAC, TEKFAC, TKFAC
from tekfac.version import __version__

__all__ = ["EKFAC", "KFAC", "TEKFAC", "TKFAC", "__version__", "explain", "fisher", "register_layer"]
