"""Image data: found, fetched, checked, read into memory, and served in batches."""

from tekfac.lab.data.batches import Batches
from tekfac.lab.data.images import DataSet, Images
from tekfac.lab.data.loading import load

__all__ = ["Batches", "DataSet", "Images", "load"]
