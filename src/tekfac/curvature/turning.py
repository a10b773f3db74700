"""Products with the eigenvectors Q of a side, in its form: into the eigenbasis and back.

    rows       x Q, x Q^T    of x [..., G, R, d]
    columns    Q^T x, Q x    of x [..., G, d, C]

A step turns every gradient along vectors that stay for many steps. Where matrices are small, to find their
blocks takes longer than to multiply by them: so a `Turning` finds them once.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from tekfac.curvature import frequencies
from tekfac.curvature.symmetric import in_blocks


class Turning:
    """The eigenvectors of a side, as they are multiplied with. By frequencies only rows are."""

    def __init__(self, vectors: Tensor) -> None:
        """Find their blocks.

        Args:
            vectors: Q, in the form of the side (see symmetric.py).
        """
        kernel = vectors.shape[1:-2]  # of a side of inputs, along which nothing but rows is turned
        self._waves = frequencies.transform(kernel, vectors) if kernel else None
        vectors = in_blocks(vectors)
        _, dim, size = vectors.shape
        self._is_whole, self._is_diagonal = size == dim, size == 1 != dim
        self._vectors, self._turned = vectors, vectors.mT
        self._has_whole_channels = not self._is_diagonal and size * math.prod(kernel) == dim
        if not (self._is_whole or self._is_diagonal):
            self._blocks = _Blocks.of(vectors)
            self._turned_blocks = self._blocks.turned()

    def rows_into(self, x: Tensor) -> Tensor:
        """x Q: coordinates along the eigenvectors of rows [..., G, R, d]."""
        if self._waves is not None:
            return self._into_frequencies(x, self._waves)
        if self._is_whole:
            return _product(x, self._vectors)
        return x if self._is_diagonal else _rows(x, self._blocks)

    def rows_out_of(self, x: Tensor) -> Tensor:
        """x Q^T: back from the coordinates, rows [..., G, R, d]."""
        if self._waves is not None:
            return self._out_of_frequencies(x, self._waves)
        if self._is_whole:
            return _product(x, self._turned)
        return x if self._is_diagonal else _rows(x, self._turned_blocks)

    def columns_into(self, x: Tensor) -> Tensor:
        """Q^T x: coordinates along the eigenvectors of columns [..., G, d, C]."""
        if self._is_whole:
            return _product(self._turned, x)
        return x if self._is_diagonal else _columns(self._turned_blocks, x)

    def columns_out_of(self, x: Tensor, out: Tensor | None = None) -> Tensor:
        """Q x: back from the coordinates, columns [..., G, d, C]; put into `out` if that is given."""
        if self._is_whole and out is not None:
            return torch.bmm(self._vectors, x, out=out)
        found = x
        if self._is_whole:
            found = _product(self._vectors, x)
        elif not self._is_diagonal:
            found = _columns(self._blocks, x)
        return found if out is None else out.copy_(found)

    def _into_frequencies(self, x: Tensor, waves: Tensor) -> Tensor:
        """Rows [..., G, R, C P] along the eigenvectors, those of the first frequency first."""
        rows, dim = x.shape[-2:]
        split = frequencies.split(x.reshape(math.prod(x.shape[:-2]), rows, dim), waves)  # [... G, P, R, C]
        if x.ndim == 3 and self._has_whole_channels:
            found = x.new_empty(x.shape)
            places = _side_by_side(found, *split.shape[1::2])
            for own, part, into in zip(self._blocks.of_groups, split, places, strict=True):
                torch.bmm(part, own, out=into)
            return found
        found = split.transpose(1, 2).reshape(x.shape)
        return found if self._is_diagonal else _rows(found, self._blocks)

    def _out_of_frequencies(self, x: Tensor, waves: Tensor) -> Tensor:
        """The inverse."""
        rows, dim = x.shape[-2:]
        positions, channels = len(waves), dim // len(waves)
        if x.ndim == 3 and self._has_whole_channels:
            split = x.new_empty(len(x), positions, rows, channels)
            parts = _side_by_side(x, positions, channels)
            for own, part, into in zip(self._turned_blocks.of_groups, parts, split, strict=True):
                torch.bmm(part, own, out=into)
            return frequencies.joined(split, waves)
        found = x if self._is_diagonal else _rows(x, self._turned_blocks)
        split = found.reshape(math.prod(x.shape[:-2]), rows, positions, channels).transpose(1, 2)
        return frequencies.joined(split, waves).reshape(x.shape)


class _Blocks(NamedTuple):
    """Blocks of a side.

    Attributes:
        of_groups: those of full size of every group, [n, b, b] each.
        whole: the same of all groups, [G n, b, b], where all blocks are of full size; else None.
        last: the smaller last one, [G, r, r]; None if all are full.
    """

    of_groups: tuple[Tensor, ...]
    whole: Tensor | None
    last: Tensor | None

    @classmethod
    def of(cls, vectors: Tensor) -> _Blocks:
        _, dim, size = vectors.shape
        end = dim // size * size
        of_groups = tuple(own[:end].unflatten(0, (-1, size)) for own in vectors)
        if end == dim:
            return cls(of_groups, vectors.reshape(-1, size, size), None)
        return cls(of_groups, None, vectors[:, end:, : dim - end])

    def turned(self) -> _Blocks:
        """Each block turned round."""
        whole, last = (None if own is None else own.mT for own in (self.whole, self.last))
        return _Blocks(tuple(own.mT for own in self.of_groups), whole, last)


def _product(x: Tensor, y: Tensor) -> Tensor:
    """x y; by the call that takes least time where that counts, for small matrices at every step."""
    return torch.bmm(x, y) if x.ndim == y.ndim == 3 and x.shape[0] == y.shape[0] else x @ y


def _rows(x: Tensor, blocks: _Blocks) -> Tensor:
    """x times each block, for rows [..., G, R, d]."""
    found = x.new_empty(x.shape)
    count, size, _ = blocks.of_groups[0].shape
    if x.ndim > 3:
        for place, part in enumerate(torch.split(x[..., : count * size], size, dim=-1)):
            own = torch.stack([group[place] for group in blocks.of_groups])
            found[..., place * size : (place + 1) * size] = part @ own
    else:
        rows, places = _side_by_side(x, count, size), _side_by_side(found, count, size)
        for own, part, into in zip(blocks.of_groups, rows, places, strict=True):
            torch.bmm(part, own, out=into)
    if blocks.last is not None:
        rest = blocks.last.shape[-1]
        torch.matmul(x.narrow(-1, count * size, rest), blocks.last, out=found.narrow(-1, count * size, rest))
    return found


def _side_by_side(x: Tensor, count: int, size: int) -> list[Tensor]:
    """Of every group of rows [G, R, d], so many blocks of columns, [n, R, b]: views."""
    between, down, along = x.stride()
    shape, strides = (count, x.shape[1], size), (size * along, down, along)
    starts = (x.storage_offset() + group * between for group in range(x.shape[0]))
    return [x.as_strided(shape, strides, start) for start in starts]


def _columns(blocks: _Blocks, x: Tensor) -> Tensor:
    """Each block times x, for columns [..., G, d, C]."""
    if x.ndim > 3:
        return _rows(x.mT, blocks.turned()).mT
    count, size, _ = blocks.of_groups[0].shape
    if blocks.whole is not None:
        return torch.bmm(blocks.whole, x.reshape(-1, size, x.shape[2])).view(x.shape)
    assert blocks.last is not None
    found, rest = x.new_empty(x.shape), blocks.last.shape[-1]
    for own, part, into in zip(blocks.of_groups, x, found, strict=True):
        rows, places = (own[: count * size].unflatten(0, (count, size)) for own in (part, into))
        torch.bmm(own, rows, out=places)
    torch.bmm(blocks.last, x.narrow(1, count * size, rest), out=found.narrow(1, count * size, rest))
    return found
