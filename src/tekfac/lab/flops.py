"""Operations of a network's passes over a batch, counted without doing them."""

from __future__ import annotations

import copy

from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode


def flops_of_a_step(model: nn.Module, inputs: Tensor) -> int:
    """Floating-point operations of a forward and a backward pass, on the meta device; the model stays as it is.

    Args:
        model: that returns a tensor.
        inputs: a batch, whose shape and type count.
    """
    shadow = copy.deepcopy(model).to("meta").train()
    with FlopCounterMode(display=False) as counter:
        shadow(inputs.to("meta")).sum().backward()
    return int(counter.get_total_flops())
