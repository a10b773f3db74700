"""Layers that are preconditioned together: blocks of equal size, put one behind the other.

A network has many blocks of equal size (norms, the layers of a transformer, those of a stage of convolutions)
whose arithmetic takes less time than the calls that ask for it, or as long. They become one block with all
their groups, with room of its own for gradients and directions. What is large is alone in its stack. Nothing is
kept twice: the bases of stacked layers are views of the stack's.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from operator import is_
from typing import NamedTuple

import torch
from torch import Tensor

from tekfac.common.torch_internals import copy_each
from tekfac.curvature.eigenbasis import Eigenbasis, Turnings
from tekfac.curvature.layer_curvature import LayerCurvature
from tekfac.curvature.motion import NO_MOTION, LayerMotion, Motion, StepForm
from tekfac.curvature.pieces import in_pieces
from tekfac.damping import DampingRule, Spectrum, added_by
from tekfac.layers.layer import Layer

SMALL = 2**14
"""Numbers in a layer's two sides and its diagonal up to which its denominators are kept."""

STACKED = 2**18
"""The same up to which it is stacked. Beyond, multiplications take so long that calls do not count."""

ROOMY = 2**17
"""The same up to which a layer that is alone has room of its own for its gradient."""

GIVEN_BACK = 2**15
"""Numbers in the room of a stack from which it is given back between two steps, when networks need theirs."""

RESIZED_ON = ("cpu", "cuda", "xpu", "meta")
"""Types of devices whose memory torch can take away from a tensor and give it again."""

Network = Sequence[Spectrum]


def numbers_of(layer: Layer) -> int:
    """In the eigenvectors of both sides and the diagonal."""
    shape = layer.shape
    sides = shape.d_in * shape.side_in + shape.d_out * shape.side_out
    return shape.groups * (sides + shape.d_in * shape.d_out)


def stacked(layers: Mapping[str, Layer]) -> list[tuple[str, ...]]:
    """The names of the layers that go together, in the order of the first of each."""
    together: dict[object, list[str]] = {}
    for name, layer in layers.items():
        shape = layer.shape
        size = (shape.d_out, shape.d_in, shape.forms)
        small = numbers_of(layer) <= STACKED and Room.of([layer]) is not None
        key = (size, layer.dtype, layer.weight.device) if small else name
        together.setdefault(key, []).append(name)
    return [tuple(names) for names in together.values()]


class StepInputs(NamedTuple):
    """What the directions of a step are made of, besides the blocks.

    Attributes:
        gradients: of the parameters that have one.
        rules: the damping rule of each layer.
        momenta: the weight of the past in each layer's mean gradient, where gradients are averaged.
        finite: whether all gradients are, a boolean on the device; None: they are.
    """

    gradients: Mapping[Tensor, Tensor]
    rules: Mapping[str, DampingRule]
    momenta: Mapping[str, float]
    finite: Tensor | None = None


class Prepared(NamedTuple):
    """Gradients of a stack's layers on their way.

    Attributes:
        projected: what the denominators are to divide, in place, [G, d_out, d_in].
        found: of each parameter that has a gradient, a place for its direction or the gradient itself.
    """

    projected: Tensor
    found: Mapping[Tensor, Tensor]


class Stack:
    """Blocks of equal size, as one with all their groups.

    Attributes:
        layers: whose blocks they are.
        curvatures: of the layers, whose bases are views of the stack's.
        basis: all their eigenvectors; of a single layer, its own tensors.
    """

    def __init__(
        self,
        layers: Sequence[Layer],
        curvatures: Sequence[LayerCurvature],
        form: StepForm,
        motions: Mapping[str, LayerMotion],
        before: Stack | None = None,
    ) -> None:
        """Put blocks together.

        Args:
            layers: whose blocks they are.
            curvatures: of the layers.
            form: of the step.
            motions: what was gathered so far of the layers' gradients, in these very bases, by name.
            before: a stack of the same layers, whose room is taken over, and what was gathered in its bases.
        """
        self.layers = tuple(layers)
        self._form = form
        bases = [curvature.basis for curvature in curvatures]
        self.basis, views = _joined(bases, [layer.shape.groups for layer in layers])
        self.curvatures = tuple(map(_with_basis, curvatures, views))
        self._turnings = Turnings.of(self.basis)
        self._room: Room | None
        self._motion: Motion | None
        if before is not None:
            self._room, self._motion = before._room, before._motion
            if self._motion is not None:
                self._motion.turn([curvature.basis for curvature in before.curvatures], bases)
        else:
            has_room = len(layers) > 1 or numbers_of(layers[0]) <= ROOMY
            self._room = Room.of(self.layers) if has_room else None
            self._motion = self._new_motion(motions) if form.gathers else None
        self._take_spectra()
        is_product = self._spectra[0].is_product  # whose diagonal is nowhere else
        self._keeps_denominators = form.moving_decay is None and (
            numbers_of(layers[0]) <= (ROOMY if is_product else SMALL)
        )

    def _take_spectra(self) -> None:
        """What damping rules see of the present curvatures."""
        self._spectra = tuple(map(spectrum_of, self.layers, self.curvatures))
        self._joined = self._spectra[0].theta if len(self._spectra) == 1 else None
        moving = None if self._motion is None else self._motion.second
        if moving is not None and self._form.entrywise:  # which will be read as it is then
            pairs = zip(self._spectra, moving.views, strict=True)
            self._spectra = tuple(replace(spectrum, theta=second) for spectrum, second in pairs)
            self._joined = moving.whole
        self._denominators: Tensor | None = None

    def _new_motion(self, motions: Mapping[str, LayerMotion]) -> Motion:
        shape, groups = self.layers[0].shape, [layer.shape.groups for layer in self.layers]
        like = self.basis.scale.new_empty(1).expand(sum(groups), shape.d_out, shape.d_in)
        parts = [motions.get(layer.name, NO_MOTION) for layer in self.layers]
        return Motion(self._form, groups, like, parts)

    @property
    def spectra(self) -> tuple[Spectrum, ...]:
        """Of the layers, for their damping rules: as they are now, where second moments move."""
        moving = None if self._motion is None else self._motion.second
        if moving is None or self._form.entrywise:
            return self._spectra
        return tuple(map(_with_mean, self._spectra, moving.views))

    def renew(self, curvatures: Sequence[LayerCurvature]) -> None:
        """Put other curvatures of the same layers in the place of these, whose bases are lost."""
        if self._motion is not None:
            self._motion.turn([own.basis for own in self.curvatures], [new.basis for new in curvatures])
        pairs = list(zip(self.curvatures, curvatures, strict=True))
        changed = [(old.basis, new.basis) for old, new in pairs if old.basis is not new.basis]
        if changed:  # factors may be measured more often than decomposed
            copy_each([own for old, _ in changed for own in old], [own for _, new in changed for own in new])
        self.curvatures = tuple(_with_basis(new, old.basis) for old, new in pairs)
        self._take_spectra()

    def is_of(self, curvatures: Sequence[LayerCurvature]) -> bool:
        """Whether these are the curvatures, themselves."""
        return len(self.curvatures) == len(curvatures) and all(map(is_, self.curvatures, curvatures))

    def forget_damping(self) -> None:
        """Compute the denominators anew when they are needed next."""
        self._denominators = None

    def motions(self) -> dict[str, LayerMotion]:
        """What was gathered of the layers' gradients so far, by name: views."""
        if self._motion is None:
            return {}
        return dict(zip((layer.name for layer in self.layers), self._motion.parts(), strict=True))

    def take_back(self, steps: int) -> None:
        """Count less: so many of the last steps were not finite."""
        if self._motion is not None:
            self._motion.take_back(steps)

    def prepare(self, given: StepInputs) -> Prepared | None:
        """Gradients in the eigenbasis, after what is gathered of them; None if no layer has any."""
        gradients = given.gradients
        present = [layer.weight in gradients for layer in self.layers]
        if not any(present):
            return None
        if self._room is not None:
            if not all(present):
                here = (layer for layer, is_here in zip(self.layers, present, strict=True) if is_here)
                gradients = {p: gradients[p] for layer in here for p in layer.parameters if p in gradients}
            found: Mapping[Tensor, Tensor] = self._room.gather(gradients)
            matrix = self._room.whole
        else:
            (layer,) = self.layers
            bias = None if layer.bias is None else gradients.get(layer.bias)
            matrix = layer.to_matrix(gradients[layer.weight], bias)
            found = {p: gradients[p] for p in layer.parameters if p in gradients}
        projected = self._turnings.project(matrix)
        if self._motion is not None:
            momenta = [given.momenta[layer.name] for layer in self.layers]
            self._motion.advance(projected, momenta, present, given.finite)
        return Prepared(projected, found)

    def directions(
        self, prepared: Prepared, rules: Mapping[str, DampingRule], network: Network
    ) -> tuple[Mapping[Tensor, Tensor], list[Tensor]]:
        """Q [G~ / (S + lambda)^power] for the parameters that have a gradient.

        Returns:
            The directions, and tensors that are finite if and only if all of them are. Directions may lie in
            room that `release` gives back, or the next call uses again.
        """
        self._divide(prepared.projected, rules, network)
        if self._room is not None:
            self._turnings.unproject(prepared.projected, self._room.whole)
            return prepared.found, [self._room.whole]
        whole = self._turnings.unproject(prepared.projected)
        (layer,) = self.layers
        parts = dict(zip(layer.parameters, layer.from_matrix(whole), strict=True))
        found: dict[Tensor, Tensor] = {p: part for p, part in parts.items() if p in prepared.found}
        is_cast = any(part.dtype != whole.dtype for part in found.values())  # and may have left the range
        return found, list(found.values()) if is_cast else [whole]

    def release(self) -> None:
        """Give back the memory that directions lie in."""
        if self._room is not None:
            self._room.release()

    def _divide(self, projected: Tensor, rules: Mapping[str, DampingRule], network: Network) -> None:
        """Divide by (S + lambda)^power, in place."""
        own_rules = [rules[layer.name] for layer in self.layers]
        whole = None if self._keeps_denominators else self._joined
        is_one_rule = all(rule is own_rules[0] for rule in own_rules)
        added = added_by(own_rules[0], whole) if whole is not None and is_one_rule else None
        if whole is None or added is None:
            projected.div_(self._damped(own_rules, network))
            return
        for part, own, more in in_pieces(projected, whole, added):
            part.div_(_to_power(own + more, self._form.power))

    def _damped(self, own_rules: Sequence[DampingRule], network: Network) -> Tensor:
        """(S + lambda)^power, [G, d_out, d_in]: kept where it is small and stays, else for the moment."""
        if self._denominators is not None:
            return self._denominators
        members = zip(own_rules, self.spectra, strict=True)
        found = [rule.denominators(spectrum, network) for rule, spectrum in members]
        whole = _to_power(found[0] if len(found) == 1 else torch.cat(found), self._form.power)
        if self._keeps_denominators:
            self._denominators = whole
        return whole


class Room:
    """Memory for the gradients of a stack, and then for its directions, with a view for every parameter.

    Attributes:
        whole: [G, d_out, d_in].
        views: of every parameter, in its own shape.
    """

    def __init__(self, whole: Tensor, views: dict[Tensor, Tensor]) -> None:
        self.whole = whole
        self.views = views
        self._all = list(views.values())
        self._storage, self._bytes = whole.untyped_storage(), whole.untyped_storage().nbytes()
        self._is_lent = whole.numel() >= GIVEN_BACK and whole.device.type in RESIZED_ON

    @classmethod
    def of(cls, layers: Sequence[Layer]) -> Room | None:
        """Room for these layers; None if a parameter is no view of its matrix, or of another precision."""
        shape = layers[0].shape
        groups = [layer.shape.groups for layer in layers]
        whole = torch.zeros(
            sum(groups), shape.d_out, shape.d_in, dtype=layers[0].dtype, device=layers[0].weight.device
        )
        views: dict[Tensor, Tensor] = {}
        for layer, own in zip(layers, torch.split(whole, groups), strict=True):
            views.update(zip(layer.parameters, layer.shape.from_matrix(own), strict=True))
        storage = whole.untyped_storage().data_ptr()
        fits = all(p.dtype == v.dtype and v.untyped_storage().data_ptr() == storage for p, v in views.items())
        return cls(whole, views) if fits else None

    def gather(self, gradients: Mapping[Tensor, Tensor]) -> dict[Tensor, Tensor]:
        """Put gradients in, 0 for parameters that have none; the views of those that have one."""
        if self._storage.nbytes() != self._bytes:
            self._storage.resize_(self._bytes)
        found = [gradients[parameter] for parameter in self.views if parameter in gradients]
        if len(found) == len(self.views):
            copy_each(self._all, found)
            return self.views
        self.whole.zero_()
        views = {parameter: view for parameter, view in self.views.items() if parameter in gradients}
        copy_each(list(views.values()), found)
        return views

    def release(self) -> None:
        """Give the memory back until the next gradients come; the views stay views of it."""
        if self._is_lent:
            self._storage.resize_(0)


def _joined(bases: Sequence[Eigenbasis], groups: Sequence[int]) -> tuple[Eigenbasis, Sequence[Eigenbasis]]:
    """Bases one behind the other, and views of each."""
    if len(bases) == 1:
        return bases[0], bases
    whole = Eigenbasis(*map(torch.cat, zip(*bases, strict=True)))
    return whole, [
        Eigenbasis(*views) for views in zip(*(torch.split(own, list(groups)) for own in whole), strict=True)
    ]


def _with_basis(curvature: LayerCurvature, basis: Eigenbasis) -> LayerCurvature:
    return curvature if curvature.basis is basis else replace(curvature, basis=basis)


def _with_mean(spectrum: Spectrum, mean: Tensor) -> Spectrum:
    """The product of eigenvalues with the scale sigma at which its mean is the given one, [G, 1, 1].

    Factors of which nothing is known yet, of a layer that no gradient had reached, count as identities.
    """
    basis = spectrum.basis
    means = (basis.values_in.mean(1) * basis.values_out.mean(1))[:, None]
    known = means > 0
    values_in, values_out = (torch.where(known, own, 1.0) for own in (basis.values_in, basis.values_out))
    scale = mean[:, 0, 0] / torch.where(known, means, 1.0)[:, 0]
    moved = basis._replace(values_in=values_in, values_out=values_out, scale=scale)
    return replace(spectrum, basis=moved)


def _to_power(denominators: Tensor, power: float) -> Tensor:
    if power == 1:
        return denominators
    return denominators.sqrt() if power == 0.5 else denominators.pow(power)


def spectrum_of(layer: Layer, curvature: LayerCurvature) -> Spectrum:
    """What a damping rule may look at."""
    theta = None if curvature.theta is None else curvature.theta.values[0]
    return Spectrum(curvature.basis, layer.is_convolution, theta)
