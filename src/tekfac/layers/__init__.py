"""How types of modules use their parameters, and the layers that a model's modules make.

Public here is what `tekfac.register_layer` takes: a kind of one's own is made of these (docs/layers.md).
"""

from tekfac.layers.kinds.base import Application, Call, LayerKind, Part, RowForm
from tekfac.layers.kinds.embedding import TableKind
from tekfac.layers.kinds.linear import LinearKind
from tekfac.layers.kinds.norm import UnitKind
from tekfac.layers.registry import register_layer

__all__ = [
    "Application",
    "Call",
    "LayerKind",
    "LinearKind",
    "Part",
    "RowForm",
    "TableKind",
    "UnitKind",
    "register_layer",
]
