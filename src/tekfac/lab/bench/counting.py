"""Multiplications that the formulas need: of the network itself, of preconditioning its gradient, of measuring.

Time cannot be less than they ask for unless they run at a higher rate than the network's own, so that

    1 + preconditioning / network

is what a plain step costs beside one of SGD if both do equally well. What measuring takes is counted as it is
done, over a cycle: products of matrices, and a second backward pass where there is one; not the decompositions.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch.utils.flop_counter import FlopCounterMode

from tekfac.curvature.blocks.kronecker import KroneckerBlock
from tekfac.lab.bench.networks import Network, loss_of
from tekfac.lab.bench.timing import Racer

FLOPS_PER_MULTIPLICATION = 2
"""Each comes with an addition."""


def of_network(network: Network) -> int:
    """Multiplications of a forward and a backward pass over one batch, counted as they are done."""
    model, (inputs, labels) = network.make(), network.batches()[0]
    with FlopCounterMode(display=False) as counter:
        loss_of(model(inputs), labels).backward()  # type: ignore[no-untyped-call]
    return int(counter.get_total_flops()) // FLOPS_PER_MULTIPLICATION


def of_preconditioning(blocks: Mapping[str, KroneckerBlock]) -> int:
    """Multiplications of one step's preconditioning: every gradient matrix into the eigenbasis and back."""
    return sum(_of_block(block) for block in blocks.values())


def _of_block(block: KroneckerBlock) -> int:
    """2 G d_out d_in (b_in + b_out), b being the size of a side's blocks; a diagonal side is not turned.

    By frequencies, to find them takes as many more as the kernel has entries.
    """
    shape = block.shape
    return 2 * shape.size * sum(count for count in shape.forms.turning(shape.d_in, shape.d_out) if count > 1)


def of_cycle(racer: Racer) -> int:
    """Multiplications of all steps of a cycle, which are taken."""
    with FlopCounterMode(display=False) as counter:
        for _ in range(racer.contestant.cycle):
            racer.step()
    return int(counter.get_total_flops()) // FLOPS_PER_MULTIPLICATION


def limit(network: int, preconditioning: int, measuring: int = 0, every: int = 1) -> float:
    """The ratio to SGD by counting: of a plain step, or of the mean step where measuring is counted, too."""
    return 1 + (preconditioning + measuring / every) / network


def counted(network: Network, blocks: Mapping[str, KroneckerBlock], racer: Racer) -> dict[str, Any]:
    """All counts and the ratios that follow, as plain values."""
    whole, own, every = of_network(network), of_preconditioning(blocks), racer.contestant.cycle
    measuring = of_cycle(racer) - every * (whole + own)
    return {
        "network": whole,
        "preconditioning": own,
        "measuring": measuring,
        "limit_of_plain_step": limit(whole, own),
        "limit": limit(whole, own, measuring, every),
    }
