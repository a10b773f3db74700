"""The Fisher information matrix as an object: estimate, compare, save and use its blocks."""

from tekfac.curvature.blocks.block import Block
from tekfac.curvature.blocks.block_diagonal import BlockDiagonal
from tekfac.curvature.blocks.dense import DenseBlock
from tekfac.curvature.blocks.gram import GramBlock
from tekfac.curvature.blocks.kronecker import KroneckerBlock
from tekfac.fisher.compare_to_exact import compare
from tekfac.fisher.comparison_table import Comparison
from tekfac.fisher.estimate_blocks import estimate, exact_blocks
from tekfac.fisher.options import Options
from tekfac.fisher.save_and_load import load, save

__all__ = [
    "Block",
    "BlockDiagonal",
    "Comparison",
    "DenseBlock",
    "GramBlock",
    "KroneckerBlock",
    "Options",
    "compare",
    "estimate",
    "exact_blocks",
    "load",
    "save",
]
