"""Which kind a module is of; users may add their own."""

from __future__ import annotations

from torch import nn

from tekfac.layers.kinds import huggingface
from tekfac.layers.kinds.attention import AttentionKind
from tekfac.layers.kinds.base import LayerKind
from tekfac.layers.kinds.convolution import ConvolutionKind, TransposedConvolutionKind
from tekfac.layers.kinds.embedding import TableKind
from tekfac.layers.kinds.linear import LinearKind
from tekfac.layers.kinds.norm import BATCH_NORM, GROUP_NORM, INSTANCE_NORM, LAYER_NORM, RMS_NORM, UnitKind
from tekfac.layers.kinds.recurrent import RecurrentKind

_KINDS: dict[type[nn.Module] | str, LayerKind] = {
    nn.Linear: LinearKind(),
    **dict.fromkeys((nn.Conv1d, nn.Conv2d, nn.Conv3d), ConvolutionKind()),
    **dict.fromkeys(
        (nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d),
        TransposedConvolutionKind(layout="input first"),
    ),
    nn.Embedding: TableKind(),
    nn.MultiheadAttention: AttentionKind(),
    **dict.fromkeys((nn.RNN, nn.LSTM, nn.GRU), RecurrentKind()),
    nn.LayerNorm: LAYER_NORM,
    nn.RMSNorm: RMS_NORM,
    nn.GroupNorm: GROUP_NORM,
    **dict.fromkeys((nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d), BATCH_NORM),
    **dict.fromkeys((nn.InstanceNorm1d, nn.InstanceNorm2d, nn.InstanceNorm3d), INSTANCE_NORM),
    **huggingface.KINDS,
}


def register_layer(module_type: type[nn.Module] | str, kind: LayerKind) -> None:
    """Let optimizers and `tekfac.fisher` precondition modules of another type.

    Args:
        module_type: the class, or its full name ("package.module.Class") where it should not be imported.
            Classes derived from it that do not redefine `forward` are of the same kind.
        kind: how such a module uses its parameters: `tekfac.layers.LinearKind` and
            `tekfac.layers.UnitKind` cover most; docs/layers.md shows how to write another one.

    Raises:
        TypeError: for a type that is no class of modules, or a kind that is none.
    """
    is_class = isinstance(module_type, type) and issubclass(module_type, nn.Module)
    if not is_class and not (isinstance(module_type, str) and "." in module_type):
        raise TypeError(
            f"Cannot register {module_type!r}. Expected a class derived from nn.Module, or its full name, "
            "'package.module.Class'."
        )
    if not isinstance(kind, LayerKind):
        raise TypeError(
            f"Cannot register {module_type!r} as {kind!r}. Expected a tekfac.layers.LayerKind, for instance "
            "LinearKind(layout='input first')."
        )
    _KINDS[module_type] = kind


def supported_types() -> list[str]:
    """The names of the types that have a kind."""
    own = [kind for kind in _KINDS if isinstance(kind, type) and not kind.__module__.startswith("torch.nn")]
    torchs = [f"nn.{kind.__name__}" for kind in _KINDS if isinstance(kind, type) and kind not in own]
    return [*torchs, *(kind.__name__ for kind in own), *(name for name in _KINDS if isinstance(name, str))]


def kind_of(module: nn.Module) -> LayerKind | None:
    """The kind of a module; None if its type, and those it is derived from, have none."""
    found = _registered(module)
    return None if found is None else found[1]


def is_norm(module: nn.Module) -> bool:
    """Whether a module normalises its input and scales the units."""
    kind = kind_of(module)
    return isinstance(kind, UnitKind) and kind.normalise is not None


def has_own_forward(module: nn.Module) -> bool:
    """Whether a module computes something else than the type, with a kind, that its own is derived from."""
    found = _registered(module)
    if found is None:
        return False
    base, kind = found
    return any(
        getattr(type(module), method, None) is not getattr(base, method, None) or method in vars(module)
        for method in kind.methods
    )


def _registered(module: nn.Module) -> tuple[type[nn.Module], LayerKind] | None:
    """The nearest type, among those that the module's is derived from, with a kind."""
    for base in type(module).__mro__:
        kind = _KINDS.get(base) or _KINDS.get(f"{base.__module__}.{base.__qualname__}")
        if kind is not None:
            return base, kind
    return None
