"""The curvature of a whole network: all its layers' blocks, refreshed together, damped together."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from tekfac.curvature.blocks.block_diagonal import BlockDiagonal
from tekfac.curvature.blocks.kronecker import KroneckerBlock
from tekfac.curvature.eigenbasis import Eigenbasis
from tekfac.curvature.layer_curvature import Due, LayerCurvature, Recipe, refreshed
from tekfac.curvature.precondition import precondition
from tekfac.damping import DampingRule, Spectrum
from tekfac.layers.batch import LayerBatch
from tekfac.layers.layer import Layer


class LayerSignals(NamedTuple):
    """What tells, from outside, how a layer's curvature is doing.

    Attributes:
        trace: of its approximate Fisher block.
        damping: the mean of what damping adds to the block's eigenvalues.
        condition: the largest damped eigenvalue divided by the smallest.
        failed_refreshes: how often its decomposition failed for good and an older basis was kept.
    """

    trace: float
    damping: float
    condition: float
    failed_refreshes: int


class NetworkCurvature:
    """One Fisher block per layer.

    Attributes:
        layers: the layers, by name.
    """

    def __init__(self, layers: Mapping[str, Layer], recipe: Recipe) -> None:
        self.layers = layers
        self._recipe = recipe
        self._blocks: dict[str, LayerCurvature] = {}
        self._denominators: dict[str, Tensor] = {}
        self._damped_by: Mapping[str, DampingRule] = {}

    @property
    def blocks(self) -> dict[str, LayerCurvature]:
        """The block of every layer seen so far, by layer name."""
        return self._blocks

    @blocks.setter
    def blocks(self, blocks: dict[str, LayerCurvature]) -> None:
        self._blocks = blocks
        self._denominators = {}

    def refreshed(self, batches: Mapping[str, Sequence[LayerBatch]], due: Due) -> dict[str, LayerCurvature]:
        """New blocks for what is due; the present ones stay in place until they are assigned.

        Raises:
            NonFiniteStatisticsError: if the batches lead to numbers that are not finite.
        """
        blocks = dict(self._blocks)
        for name in self.layers:
            old, seen = self._blocks.get(name), batches.get(name, [])
            if seen:
                blocks[name] = refreshed(old, seen, due, self._recipe)
            elif old is not None and due.basis:
                blocks[name] = refreshed(old, [], Due(factors=False, basis=True, rescaling=False), self._recipe)
        return blocks

    def block_diagonal(self) -> BlockDiagonal[KroneckerBlock]:
        """The present blocks as a matrix; later refreshes do not change it."""
        return BlockDiagonal(
            KroneckerBlock(layer.shape, block.basis, None if block.theta is None else block.theta.values[0])
            for name, layer in self.layers.items()
            if (block := self._blocks.get(name)) is not None
        )

    def natural_gradients(
        self, gradients: Mapping[Tensor, Tensor], rules: Mapping[str, DampingRule]
    ) -> dict[Tensor, Tensor]:
        """(F_hat + damping)^-1 applied to gradients, for the parameters of every layer that has both.

        Args:
            gradients: of the parameters that have one.
            rules: the damping rule of each layer.
        """
        denominators = self._damped(rules)
        directions: dict[Tensor, Tensor] = {}
        for name, block in self._blocks.items():
            layer = self.layers[name]
            if layer.weight not in gradients:
                continue
            bias_gradient = None if layer.bias is None else gradients.get(layer.bias)
            gradient = layer.to_matrix(gradients[layer.weight], bias_gradient)
            direction = precondition(gradient, block.basis, denominators[name])
            parts = zip(layer.parameters, layer.from_matrix(direction), strict=True)
            directions.update((parameter, part) for parameter, part in parts if parameter in gradients)
        return directions

    def signals(self, rules: Mapping[str, DampingRule]) -> dict[str, LayerSignals]:
        """The state of every layer seen so far, under the given damping rules, in a few numbers each."""
        denominators = self._damped(rules)
        found = {}
        for name, block in self._blocks.items():
            values, damped = block.rescaling.double(), denominators[name].double()
            found[name] = LayerSignals(
                trace=float(values.sum()),
                damping=float((damped - values).mean()),
                condition=float(damped.max() / damped.min()),
                failed_refreshes=block.failed_refreshes,
            )
        return found

    def check_rules(self, rules: Mapping[str, DampingRule]) -> None:
        """Let every rule damp a block of a single entry, so that one that cannot be used here says so now.

        Raises:
            ValueError: by the rule, in its own words.
        """
        one = torch.ones(1, 1)
        basis = Eigenbasis(one[None], one[None], one, one, one[0])
        is_product = not self._recipe.rescaling.measured
        spectra = {
            name: Spectrum(one[None], basis, layer.is_convolution, is_product)
            for name, layer in self.layers.items()
        }
        for name, spectrum in spectra.items():
            rules[name].denominators(spectrum, list(spectra.values()))

    def _damped(self, rules: Mapping[str, DampingRule]) -> dict[str, Tensor]:
        """S + lambda of every layer; computed anew only when blocks or rules changed."""
        if not self._denominators or rules != self._damped_by:
            spectra = {
                name: Spectrum(
                    block.rescaling, block.basis, self.layers[name].is_convolution, block.theta is None
                )
                for name, block in self._blocks.items()
            }
            network = list(spectra.values())
            self._denominators = {
                name: rules[name].denominators(spectrum, network) for name, spectrum in spectra.items()
            }
            self._damped_by = rules
        return self._denominators
