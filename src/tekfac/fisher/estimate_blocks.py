"""Fisher blocks of a model on a data set: a method's approximation, or the exact ones."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Unpack

from torch import nn

from tekfac.curvature.blocks.block import DENSE_LIMIT
from tekfac.curvature.blocks.block_diagonal import BlockDiagonal
from tekfac.curvature.blocks.dense import DenseBlock
from tekfac.curvature.blocks.kronecker import KroneckerBlock
from tekfac.curvature.eigenbasis import Eigenbasis
from tekfac.fisher.approximation import Approximation
from tekfac.fisher.bases import Wanted, bases_of
from tekfac.fisher.collectors import DenseSum, FactorSums, SquareSums
from tekfac.fisher.metadata import metadata_of
from tekfac.fisher.options import Keywords, Options, resolve
from tekfac.fisher.survey import Survey
from tekfac.ranks.failing_together import failing_together
from tekfac.ranks.group import Ranks, ranks_of

logger = logging.getLogger("tekfac")


def estimate(
    model: nn.Module,
    loader: Iterable[Any],
    *,
    method: str = "tekfac",
    sharing: str | None = None,
    checkpoint: str | Path | None = None,
    checkpoint_seconds: float = 60.0,
    **keywords: Unpack[Keywords],
) -> BlockDiagonal[KroneckerBlock]:
    """A method's approximation of the Fisher block of every layer, over a whole data set.

    One pass over the data; two for the corrected methods, which measure their diagonal in the basis that
    the first pass gives. Memory does not grow with the data. The model is evaluated in eval mode.

    Args:
        model: the network.
        loader: batches of (inputs, targets), of inputs alone, or dicts of the model's keywords; it is read
            once or twice and has to give the same data each time.
        method: "kfac", "ekfac", "tkfac" or "tekfac".
        sharing: of weights over positions: "exact", "expand" or "reduce"; None: the method's own.
        checkpoint: a file that what was summed up so far is written to, and taken up from.
        checkpoint_seconds: between two writings.
        **keywords: see `tekfac.fisher.Options`.

    Returns:
        The blocks by layer name. In a parameter's units they are those of one loss term: F is a mean; of
        several predictions, the sum of theirs.
    """
    options = resolve("estimate", keywords, ("method", "sharing", "checkpoint", "checkpoint_seconds"))
    approximation = Approximation.named(method, sharing)
    passes = 2 if approximation.corrected or checkpoint is not None else 1
    asked = {"method": approximation.method.name, "sharing": approximation.sharing}
    with failing_together(ranks_of(model, options.process_group, apart=False)) as ranks:
        of_all = {**asked, "whether there is a checkpoint": checkpoint is not None}
        survey = Survey(model, loader, options, ranks, passes, of_all)
        how = {**asked, **metadata_of(survey.model, options)}
        if checkpoint is not None:
            shapes = [layer.shape.parameters for layer in survey.layers.values()]
            sizes = {name: list(shape) for own in shapes for name, shape in own.items()}
            survey.keep_at(checkpoint, {**how, "parameters": sizes}, checkpoint_seconds)
        bases = _bases(survey, approximation, options.memory_budget, ranks)
        if approximation.corrected:
            blocks = _corrected_blocks(survey, bases, options.memory_budget)
        else:
            blocks = [KroneckerBlock(survey.layers[name].shape, basis) for name, basis in bases.items()]
        return BlockDiagonal(blocks, {**how, **survey.count.plain()})


def _bases(
    survey: Survey, approximation: Approximation, memory_budget: int, ranks: Ranks
) -> dict[str, Eigenbasis]:
    """The first pass: the eigenbasis of every layer that was seen."""
    rule, sharing = approximation.method.factors, approximation.sharing
    sums = {name: [FactorSums(rule, sharing, memory_budget)] for name in survey.layers}
    seen = survey.run("factors", sums)
    moments = {name: sums[name][0].moments(survey.count.shares) for name in seen}
    wanted = {
        name: Wanted(approximation, name, own, survey.layers[name].dtype) for name, own in moments.items()
    }
    return bases_of(wanted, ranks)


def _corrected_blocks(
    survey: Survey, bases: Mapping[str, Eigenbasis], memory_budget: int
) -> list[KroneckerBlock]:
    """The second pass: blocks with the diagonal that is measured in these bases."""
    squares = {name: [SquareSums(basis, memory_budget)] for name, basis in bases.items()}
    survey.run("second moments", squares)
    blocks = []
    for name, (own,) in squares.items():
        layer = survey.layers[name]
        # A pass that was taken up brings its own basis.
        blocks.append(KroneckerBlock(layer.shape, own.basis, own.theta(survey.count.shares).to(layer.dtype)))
    return blocks


def exact_blocks(
    model: nn.Module, loader: Iterable[Any], *, limit: int = DENSE_LIMIT, **keywords: Unpack[Keywords]
) -> BlockDiagonal[DenseBlock]:
    """The Fisher blocks themselves, as matrices, in one pass over the data.

    Args:
        model: the network.
        loader: as for `estimate`.
        limit: rows up to which a block is formed. Larger ones are left out, and named in the log.
        **keywords: see `tekfac.fisher.Options`.

    Raises:
        ValueError: if a layer that was asked for by name is too large, or all layers are.
    """
    options = resolve("exact_blocks", keywords, ("limit",))
    with failing_together(ranks_of(model, options.process_group, apart=False)) as ranks:
        survey = Survey(model, loader, options, ranks, asked={"limit": limit})
        return BlockDiagonal(
            _exact_blocks(survey, options, limit),
            {"method": "exact", **metadata_of(survey.model, options), **survey.count.plain()},
        )


def _exact_blocks(survey: Survey, options: Options, limit: int) -> list[DenseBlock]:
    """Those that are not too large."""
    too_large = {n: layer.shape.size for n, layer in survey.layers.items() if layer.shape.size > limit}
    if too_large and (options.layers is not None or len(too_large) == len(survey.layers)):
        sizes = ", ".join(f"{name!r} has {size} rows" for name, size in too_large.items())
        raise ValueError(
            f"Too large to be formed: {sizes}, the limit is {limit}. fisher.compare measures errors without "
            "forming the block; fisher.estimate gives an approximation; or raise limit=..."
        )
    if too_large:
        sizes = ", ".join(f"{name!r} ({size} rows)" for name, size in too_large.items())
        logger.warning("No exact block of %s: the limit is %d rows.", sizes, limit)
    sums = {name: [DenseSum(options.memory_budget)] for name in survey.layers if name not in too_large}
    seen = survey.run("exact blocks", sums)
    shares = survey.count.shares
    return [
        DenseBlock(survey.layers[name].shape, sums.pop(name)[0].matrices(shares).to(survey.layers[name].dtype))
        for name in seen
    ]
