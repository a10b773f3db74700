"""Kinds of layers: how each type of module uses its parameters."""

from tekfac.kinds.base import Application, LayerKind, Observed, Part, RowForm
from tekfac.kinds.linear import LinearKind
from tekfac.kinds.norm import UnitKind
from tekfac.kinds.registry import register_layer
from tekfac.kinds.table import TableKind

__all__ = [
    "Application",
    "LayerKind",
    "LinearKind",
    "Observed",
    "Part",
    "RowForm",
    "TableKind",
    "UnitKind",
    "register_layer",
]
