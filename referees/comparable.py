"""The losses and kinds of Fisher that both referees and we understand in the same way."""

from typing import Literal

from torch import Tensor, nn

Fisher = Literal["empirical", "type-2"]
Loss = nn.CrossEntropyLoss | nn.MSELoss


def check_loss(loss: Loss, targets: Tensor) -> None:
    """Refuse the options of the losses that are not taken into account."""
    plain = loss.reduction in ("mean", "sum")
    if isinstance(loss, nn.CrossEntropyLoss):
        plain &= loss.weight is None and loss.label_smoothing == 0.0
        plain &= not targets.is_floating_point()
    if not plain:
        msg = f"unsupported options of {loss}, or class probabilities as targets"
        raise ValueError(msg)
