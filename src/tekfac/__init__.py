"""Natural-gradient optimizers for PyTorch: KFAC, EKFAC, TKFAC and TEKFAC."""

from tekfac.optimizers import EKFAC, KFAC, TEKFAC, TKFAC

__version__ = "0.1.0"

__all__ = ["EKFAC", "KFAC", "TEKFAC", "TKFAC", "__version__"]
