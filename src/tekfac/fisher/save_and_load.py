"""Fisher blocks in a safetensors file, and back."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tekfac.curvature.blocks.block import Block
from tekfac.curvature.blocks.block_diagonal import BlockDiagonal
from tekfac.curvature.blocks.dense import DenseBlock
from tekfac.curvature.blocks.gram import GramBlock
from tekfac.curvature.blocks.kronecker import KroneckerBlock
from tekfac.curvature.eigenbasis import Eigenbasis
from tekfac.fisher import tensor_files
from tekfac.layers.shapes import LayerShape

KIND = "Fisher blocks"
VERSION = 2


def save(blocks: BlockDiagonal[Block], path: str | Path) -> None:
    """Write blocks and their metadata to a safetensors file."""
    tensors: dict[str, Tensor] = {}
    layers = []
    for index, block in enumerate(blocks.values()):
        parts, plain = _to_parts(block)
        tensors |= {f"{index}/{block.name}/{key}": tensor for key, tensor in parts.items()}
        layers.append({"shape": asdict(block.shape), "kind": type(block).__name__, **plain})
    metadata = {"kind": KIND, "version": VERSION, "layers": layers, "metadata": dict(blocks.metadata)}
    tensor_files.write(path, tensors, metadata)


def load(path: str | Path, device: str | torch.device = "cpu") -> BlockDiagonal[Block]:
    """The blocks that `save` wrote, on a device.

    Raises:
        FileNotFoundError: if there is no such file.
        ValueError: for a file of something else, of a later version, or that is not as it was written.
    """
    tensors, metadata = tensor_files.read(path, KIND)
    version = metadata.get("version")
    if not isinstance(version, int) or version > VERSION:
        raise ValueError(
            f"{str(path)!r} has version {version} of the format; this tekfac reads up to {VERSION}. Update "
            "tekfac."
        )
    try:
        return BlockDiagonal(_blocks(tensors, metadata, device), metadata["metadata"])
    except Exception as error:  # what another program wrote can end in nearly any error
        raise ValueError(
            f"{str(path)!r} holds no whole blocks: {type(error).__name__}, {error} Make it anew."
        ) from error


def _blocks(
    tensors: Mapping[str, Tensor], metadata: Mapping[str, Any], device: str | torch.device
) -> list[Block]:
    """The blocks of a file, in its order."""
    blocks = []
    for index, layer in enumerate(metadata["layers"]):
        tuples = {key: tuple(layer["shape"].get(key, ())) for key in ("weight", "parameter_names", "kernel")}
        shape = LayerShape(**{**layer["shape"], **tuples})
        prefix = f"{index}/{shape.name}/"
        parts = {k.removeprefix(prefix): t.to(device) for k, t in tensors.items() if k.startswith(prefix)}
        blocks.append(_from_parts(shape, layer, parts))
    return blocks


def _to_parts(block: Block) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """The tensors of a block, and its numbers."""
    match block:
        case KroneckerBlock():
            theta = {} if block.theta is None else {"theta": block.theta}
            return {**block.basis._asdict(), **theta}, {}
        case DenseBlock():
            return {"matrices": block.matrices}, {}
        case GramBlock():
            return {"rows": block.rows}, {"num_terms": block.num_terms}
        case _:
            raise TypeError(f"Blocks of type {type(block).__name__} cannot be saved.")


def _from_parts(shape: LayerShape, layer: Mapping[str, Any], parts: dict[str, Tensor]) -> Block:
    match layer["kind"]:
        case "KroneckerBlock":
            theta = parts.pop("theta", None)
            return KroneckerBlock(shape, Eigenbasis(**parts), theta)
        case "DenseBlock":
            return DenseBlock(shape, parts["matrices"])
        case "GramBlock":
            return GramBlock(shape, parts["rows"], layer["num_terms"])
        case kind:
            raise ValueError(f"Unknown kind of block: {kind!r}. Update tekfac.")
