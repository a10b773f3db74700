"""The curvature of a whole network: all its layers' blocks, refreshed together, damped together."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from operator import is_
from typing import NamedTuple

import torch
from torch import Tensor

from tekfac.curvature.blocks.block_diagonal import BlockDiagonal
from tekfac.curvature.blocks.kronecker import KroneckerBlock
from tekfac.curvature.eigenbasis import Eigenbasis
from tekfac.curvature.layer_curvature import NOTHING, Due, LayerCurvature, Recipe, refreshed
from tekfac.curvature.motion import LayerMotion, StepForm, turned
from tekfac.curvature.shared_refresh import refreshed_by_all
from tekfac.curvature.stacks import Stack, StepInputs, spectrum_of, stacked
from tekfac.curvature.together import alike, refreshed_together
from tekfac.damping import DampingRule, Spectrum, looks_at_network
from tekfac.layers.batch import CapturedBatch
from tekfac.layers.layer import Layer
from tekfac.ranks.group import ALONE, Ranks


class LayerSignals(NamedTuple):
    """What tells, from outside, how a layer's curvature is doing.

    Attributes:
        trace: of S: of its approximate Fisher block, or of the moving second moments of gradients.
        damping: the mean of what damping adds to the block's eigenvalues.
        condition: the largest entry of S + lambda divided by the smallest.
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

    def __init__(
        self, layers: Mapping[str, Layer], recipe: Recipe, form: StepForm, ranks: Ranks = ALONE
    ) -> None:
        """Know nothing of the layers' curvature yet.

        Args:
            layers: the layers, by name.
            recipe: how their curvature is estimated.
            form: how it makes directions of gradients.
            ranks: the processes that refresh it together.
        """
        self._ranks = ranks
        self.layers = layers
        self._recipe = recipe
        self._form = form
        self._blocks: dict[str, LayerCurvature] = {}
        self._stacks: list[Stack] = []
        self._stacked: list[Layer] = []
        self._damped_by: Mapping[str, DampingRule] = {}
        self._is_stacked = False

    @property
    def blocks(self) -> dict[str, LayerCurvature]:
        """The block of every layer seen so far, by layer name."""
        return self._blocks

    @blocks.setter
    def blocks(self, blocks: dict[str, LayerCurvature]) -> None:
        self._blocks = blocks
        self._is_stacked = False

    def refreshed(
        self, batches: Mapping[str, Sequence[CapturedBatch]], due: Mapping[str, Due]
    ) -> dict[str, LayerCurvature]:
        """New blocks for what is due; the present ones stay in place until they are assigned.

        Args:
            batches: what was captured of each layer; a layer seen for the first time is measured, due or not.
            due: what is, by layer.

        Raises:
            NonFiniteStatisticsError: if the batches lead to numbers that are not finite.
        """
        if self._ranks.count > 1:
            return refreshed_by_all(self.layers, self._blocks, batches, due, self._recipe, self._ranks)
        blocks = dict(self._blocks)
        for names in alike(self.layers, blocks, batches, due):
            old_ones, seen_ones = [blocks[name] for name in names], [batches[name][0] for name in names]
            found = refreshed_together(old_ones, seen_ones, due[names[0]], self._recipe)
            if found is not None:
                blocks.update(zip(names, found, strict=True))
        for name in self.layers:
            if blocks.get(name) is not self._blocks.get(name):
                continue
            old, seen, wanted = self._blocks.get(name), batches.get(name, ()), due.get(name, NOTHING)
            if (old is None and seen) or (old is not None and wanted != NOTHING):
                block = refreshed(old, seen, wanted, self._recipe)
                if block is not None:
                    blocks[name] = block
        return blocks

    def block_diagonal(self) -> BlockDiagonal[KroneckerBlock]:
        """The present blocks as a matrix; later refreshes do not change it."""
        blocks = self.separate_blocks()
        return BlockDiagonal(
            KroneckerBlock(layer.shape, block.basis, None if block.theta is None else block.theta.values[0])
            for name, layer in self.layers.items()
            if (block := blocks.get(name)) is not None
        )

    def separate_blocks(self) -> dict[str, LayerCurvature]:
        """The blocks, none of them a part of a stack's tensors, which would be held, or saved, as a whole."""
        shared = {layer.name for stack in self._stacks if len(stack.layers) > 1 for layer in stack.layers}
        return {
            name: replace(block, basis=Eigenbasis(*map(torch.clone, block.basis))) if name in shared else block
            for name, block in self._blocks.items()
        }

    def directions(self, given: StepInputs) -> tuple[dict[Tensor, Tensor], list[Tensor]]:
        """The preconditioned gradient, for the parameters of every layer that has a block and a gradient.

        With the form of the natural gradient that is (F_hat + damping)^-1 applied to it.

        Returns:
            The directions, and a few tensors that are finite if and only if they are; good until `release`.
        """
        directions: dict[Tensor, Tensor] = {}
        wholes: list[Tensor] = []
        stacks = self._present_stacks(given.rules)
        if self._form.gathers and any(map(looks_at_network, given.rules.values())):
            all_prepared = [stack.prepare(given) for stack in stacks]  # so that rules see all of this step
        else:
            all_prepared = [None] * len(stacks)
        network = [spectrum for stack in stacks for spectrum in stack.spectra]
        for stack, own in zip(stacks, all_prepared, strict=True):
            prepared = own or stack.prepare(given)
            if prepared is not None:
                found, whole = stack.directions(prepared, given.rules, network)
                directions.update(found)
                wholes += whole
        return directions, wholes

    def release(self) -> None:
        """Give back the memory that the last directions lie in."""
        for stack in self._stacks:
            stack.release()

    @property
    def motions(self) -> dict[str, LayerMotion]:
        """What was gathered of the gradients of every layer that has a block, in its present basis, by name."""
        return self._kept_motions()

    def load(self, blocks: dict[str, LayerCurvature], motions: Mapping[str, LayerMotion]) -> None:
        """Go on with these blocks, and what was gathered in their bases."""
        self._blocks, self._stacks = blocks, []
        self._restack(motions)

    def take_back(self, steps: int) -> None:
        """Count less: so many of the last steps were not finite, and have left everything as it was."""
        for stack in self._stacks:
            stack.take_back(steps)

    def signals(self, rules: Mapping[str, DampingRule]) -> dict[str, LayerSignals]:
        """The state of every layer seen so far, under the given damping rules, in a few numbers each."""
        spectra = {name: spectrum_of(self.layers[name], block) for name, block in self._blocks.items()}
        for stack in self._present_stacks(rules):
            spectra.update(zip((layer.name for layer in stack.layers), stack.spectra, strict=True))
        network = list(spectra.values())
        found = {}
        for name, spectrum in spectra.items():
            values = spectrum.rescaling.double()
            damped = rules[name].denominators(spectrum, network).double()
            found[name] = LayerSignals(
                trace=float(values.sum()),
                damping=float((damped - values).mean()),
                condition=float(damped.max() / damped.min()),
                failed_refreshes=self._blocks[name].failed_refreshes,
            )
        return found

    def mean_rescaling(self) -> float:
        """The mean of S over all parameters in blocks: the trace of the approximation by their number."""
        values = [spectrum_of(self.layers[name], block).rescaling for name, block in self._blocks.items()]
        count = sum(own.numel() for own in values)
        return sum(float(own.double().sum()) for own in values) / max(1, count)

    def check_rules(self, rules: Mapping[str, DampingRule]) -> None:
        """Let every rule damp a block of a single entry, so that one that cannot be used here says so now.

        Raises:
            ValueError: by the rule, in its own words.
        """
        one = torch.ones(1, 1)
        basis = Eigenbasis(one[None], one[None], one, one, one[0])
        is_entrywise = self._recipe.rescaling.measured or self._form.moves_entries
        theta = one[None] if is_entrywise else None
        spectra = {name: Spectrum(basis, layer.is_convolution, theta) for name, layer in self.layers.items()}
        for name, spectrum in spectra.items():
            rules[name].denominators(spectrum, list(spectra.values()))

    def _present_stacks(self, rules: Mapping[str, DampingRule]) -> list[Stack]:
        """The blocks, small ones put together; anew only where blocks, layers or rules are others now."""
        layers = self._layers_with_blocks()
        if len(layers) != len(self._stacked) or not all(map(is_, layers, self._stacked)):
            self._restack(self._kept_motions())
        elif not self._is_stacked:
            self._stacks = [self._renewed(stack) for stack in self._stacks]
            for stack in self._stacks:
                self._take_views(stack)
            self._is_stacked = True
        if rules is not self._damped_by:
            for stack in self._stacks:
                stack.forget_damping()
            self._damped_by = rules
        return self._stacks

    def _layers_with_blocks(self) -> list[Layer]:
        return [layer for name, layer in self.layers.items() if name in self._blocks]

    def _kept_motions(self) -> dict[str, LayerMotion]:
        """What was gathered of the layers that are what they were, in their present bases."""
        motions = {}
        for stack in self._stacks:
            gathered = stack.motions()
            for layer, curvature in zip(stack.layers, stack.curvatures, strict=True):
                name, block = layer.name, self._blocks.get(layer.name)
                if name in gathered and block is not None and layer.is_same_as(self.layers[name]):
                    motions[name] = turned(gathered[name], curvature.basis, block.basis, self._form)
        return motions

    def _restack(self, motions: Mapping[str, LayerMotion]) -> None:
        """Put all layers together anew, with what was gathered in the present bases."""
        present = self._layers_with_blocks()
        self._stacks, self._stacked = [], []  # so that what is interrupted is begun anew
        for names in stacked({layer.name: layer for layer in present}):
            layers, curvatures = [self.layers[name] for name in names], [self._blocks[name] for name in names]
            stack = Stack(layers, curvatures, self._form, motions)
            self._stacks.append(stack)
            self._take_views(stack)
        self._stacked, self._is_stacked = present, True

    def _take_views(self, stack: Stack) -> None:
        """Let blocks share their bases with a stack, so that nothing is kept twice."""
        self._blocks.update(zip((layer.name for layer in stack.layers), stack.curvatures, strict=True))

    def _renewed(self, stack: Stack) -> Stack:
        """The stack of the same layers with their present blocks."""
        curvatures = [self._blocks[layer.name] for layer in stack.layers]
        if not stack.is_of(curvatures):
            if self._form.gathers and len(stack.layers) > 1:  # so that no step will be taken back
                stack.renew(curvatures)
                return stack
            return Stack(stack.layers, curvatures, self._form, {}, stack)
        stack.forget_damping()  # which may depend on other layers
        return stack
