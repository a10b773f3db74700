"""The Kronecker-factored eigenbasis: decompose the factors, move gradients in and out of it.

With Q_in, Q_out the eigenvectors (in columns) of the two factors, the approximation is diagonal in the
basis Q_in (x) Q_out (paper, Eqs. ekfac1 and etkfac1), and in matrix form

    project      Q_out^T X Q_in
    unproject    Q_out  X Q_in^T
"""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

from tekfac.curvature import symmetric
from tekfac.curvature.factors import KroneckerFactors
from tekfac.curvature.turning import Turning


class Eigenbasis(NamedTuple):
    """Eigenvectors and eigenvalues of both factors, and the scale they were read with.

    Attributes:
        vectors_in: Q_in, [G, d_in, d_in], or in the cheaper form of a large side (see symmetric.py).
        vectors_out: Q_out, [G, d_out, d_out], likewise.
        values_in: eigenvalues of the input factor, not negative, [G, d_in]; ascending (in every block) where
            the vectors are those of this very factor.
        values_out: eigenvalues of the output factor, [G, d_out].
        scale: sigma, [G].
    """

    vectors_in: Tensor
    vectors_out: Tensor
    values_in: Tensor
    values_out: Tensor
    scale: Tensor

    def project(self, matrix: Tensor) -> Tensor:
        """Coordinates in the eigenbasis of gradient matrices [..., G, d_out, d_in]: a tensor of its own."""
        return Turnings.of(self).project(matrix)

    def unproject(self, matrix: Tensor) -> Tensor:
        """Back from the eigenbasis, [..., G, d_out, d_in]."""
        return Turnings.of(self).unproject(matrix)


class Turnings(NamedTuple):
    """Both sides of an eigenbasis, ready to turn many gradients.

    Attributes:
        inputs: along the vectors of the input side.
        outputs: along those of the output side.
    """

    inputs: Turning
    outputs: Turning

    @classmethod
    def of(cls, basis: Eigenbasis) -> Turnings:
        """Of a basis."""
        return cls(Turning(basis.vectors_in), Turning(basis.vectors_out))

    def project(self, matrix: Tensor) -> Tensor:
        """Coordinates in the eigenbasis of gradient matrices [..., G, d_out, d_in]: a tensor of its own."""
        found = self.outputs.columns_into(self.inputs.rows_into(matrix))
        return found.clone() if found is matrix else found.contiguous()

    def unproject(self, matrix: Tensor, out: Tensor | None = None) -> Tensor:
        """Back from the eigenbasis, [..., G, d_out, d_in]; put into `out` if that is given."""
        return self.outputs.columns_out_of(self.inputs.rows_out_of(matrix), out)


class Turn(NamedTuple):
    """From one eigenbasis to another: Q_old^T Q_new of both sides, None where a side has stayed.

    Attributes:
        inputs: [G, d_in, d_in], or in the cheaper form of a large side.
        outputs: [G, d_out, d_out], likewise.
    """

    inputs: Tensor | None
    outputs: Tensor | None

    @classmethod
    def of(cls, old: Eigenbasis, new: Eigenbasis) -> Turn:
        """The turn between two bases of a block."""
        stays_in, stays_out = old.vectors_in is new.vectors_in, old.vectors_out is new.vectors_out
        return cls(
            None if stays_in else symmetric.overlap(old.vectors_in, new.vectors_in),
            None if stays_out else symmetric.overlap(old.vectors_out, new.vectors_out),
        )

    def vectors(self, coordinates: Tensor) -> Tensor:
        """The same matrices in the new coordinates, [G, d_out, d_in]."""
        if self.outputs is not None:
            coordinates = Turning(self.outputs).columns_into(coordinates)
        return coordinates if self.inputs is None else Turning(self.inputs).rows_into(coordinates)

    def diagonal(self, values: Tensor) -> Tensor:
        """The diagonal, in the new basis, of what is diagonal in the old one, [G, d_out, d_in].

        Trace and positivity are kept, and a mere permutation or change of signs of the eigenvectors is undone
        exactly.
        """
        squares = Turn(*(None if side is None else side.square() for side in self))
        return squares.vectors(values)


WORTH_TRACKING = 128
"""Dimensions from which an iteration takes less than a decomposition."""

TRACKED = 0.3
"""The off-diagonal part's share up to which an iteration will do."""

WORTH_A_LOOK = 32
"""Dimensions from which it takes less time to see whether old eigenvectors still do than to find new ones."""


def decompose(
    factors: KroneckerFactors, before: Eigenbasis | None = None, tolerance: float = 0.0, *, track: bool = False
) -> Eigenbasis:
    """The eigenbasis of the factors.

    Args:
        factors: to be decomposed.
        before: the basis so far; a side keeps its vectors while they still make its factor nearly diagonal.
        tolerance: how nearly: the off-diagonal part's share of the Frobenius norm; 0 keeps nothing.
        track: whether a basis that is nearly right is improved, by an iteration, instead of computed anew.

    Raises:
        DecompositionError: if a factor defeats every attempt of `symmetric.symmetric_eigen`.
    """
    old_in, old_out = (None, None) if before is None else (before.vectors_in, before.vectors_out)
    values_in, vectors_in = decompose_side(factors.input, old_in, tolerance, track)
    values_out, vectors_out = decompose_side(factors.output, old_out, tolerance, track)
    return Eigenbasis(vectors_in, vectors_out, values_in, values_out, factors.scale)


def decompose_side(factor: Tensor, old: Tensor | None, tolerance: float, track: bool) -> tuple[Tensor, Tensor]:
    """Eigenvalues and eigenvectors of one factor.

    Raises:
        DecompositionError: if it defeats every attempt.
    """
    track = track and factor.shape[-1] >= WORTH_TRACKING
    if old is None or factor.shape[-1] < WORTH_A_LOOK or not (track or tolerance):
        return symmetric.eigen(factor)
    along = symmetric.Along.of(factor, old)
    if bool((along.off_diagonal <= tolerance).all()):
        return along.values, old
    if track and bool((along.off_diagonal <= TRACKED).all()):
        vectors = symmetric.iterated(old, along)
        if vectors is not None:
            return symmetric.Along.of(factor, vectors).values, vectors
    return symmetric.eigen(factor)


def standard_basis(factors: KroneckerFactors) -> Eigenbasis:
    """The basis of coordinate axes, with the factors' diagonals as eigenvalues.

    What is used where a first decomposition failed: the approximation is then diagonal in the
    parameters themselves, as Adam's is.
    """
    values_in, vectors_in = symmetric.axes(factors.input)
    values_out, vectors_out = symmetric.axes(factors.output)
    return Eigenbasis(vectors_in, vectors_out, values_in, values_out, factors.scale)
