"""Promise: blocks save and load as safetensors, with how they were made, and come back as they were."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import SafetensorError
from torch import Tensor, nn

import tekfac
from tekfac import fisher
from tekfac.fisher import tensor_files


def model_and_data() -> tuple[nn.Module, list[tuple[Tensor, Tensor]]]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(2, 4, 3, groups=2), nn.Flatten(), nn.Linear(16, 3, bias=False))
    return model, [(torch.randn(6, 2, 4, 4), torch.randint(3, (6,))) for _ in range(2)]


@pytest.mark.parametrize("method", ["kfac", "ekfac", "tkfac", "tekfac"])
def test_a_methods_blocks_come_back_as_they_were(method: str, tmp_path: Path) -> None:
    blocks = fisher.estimate(*model_and_data(), method=method)
    fisher.save(blocks, tmp_path / "blocks.safetensors")
    loaded = fisher.load(tmp_path / "blocks.safetensors")
    assert list(loaded) == list(blocks)
    assert loaded.metadata == blocks.metadata
    for name, block in blocks.items():
        other = loaded[name]
        assert isinstance(other, fisher.KroneckerBlock)
        assert other.shape == block.shape
        assert (other.theta is None) == (block.theta is None)
        assert all(torch.equal(a, b) for a, b in zip(other.basis, block.basis, strict=True))
        assert torch.equal(other.to_dense(), block.to_dense())


def test_exact_blocks_come_back_as_they_were(tmp_path: Path) -> None:
    blocks = fisher.exact_blocks(*model_and_data())
    fisher.save(blocks, tmp_path / "blocks.safetensors")
    for name, block in fisher.load(tmp_path / "blocks.safetensors").items():
        assert torch.equal(block.to_dense(), blocks[name].to_dense())


def test_blocks_known_by_their_rows_come_back_as_they_were(tmp_path: Path) -> None:
    shape = fisher.estimate(*model_and_data())["2"].shape
    block = fisher.GramBlock(shape, torch.randn(1, 5, shape.size), 5)
    fisher.save(fisher.BlockDiagonal([block]), tmp_path / "blocks.safetensors")
    loaded = fisher.load(tmp_path / "blocks.safetensors")["2"]
    assert torch.equal(loaded.to_dense(), block.to_dense())


def test_an_optimizers_blocks_can_be_saved(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 3))
    optimizer = tekfac.TEKFAC(model)
    nn.functional.cross_entropy(model(torch.randn(8, 6)), torch.randint(3, (8,))).backward()
    optimizer.step()
    fisher.save(optimizer.curvature, tmp_path / "blocks.safetensors")
    loaded = fisher.load(tmp_path / "blocks.safetensors")
    for name, block in optimizer.curvature.items():
        assert torch.equal(loaded[name].to_dense(), block.to_dense())


def test_the_metadata_say_how_the_blocks_were_made(tmp_path: Path) -> None:
    model, data = model_and_data()
    blocks = fisher.estimate(model, data, method="ekfac", fisher="sampled", seed=3)
    expected: dict[str, Any] = {
        "method": "EKFAC",
        "sharing": "expand",
        "fisher": "sampled",
        "likelihood": "categorical",
        "seed": 3,
        "samples": 12,
        "terms": 12,
        "tekfac": tekfac.__version__,
    }
    assert expected.items() <= dict(blocks.metadata).items()


def test_another_models_parameters_have_another_hash() -> None:
    model, data = model_and_data()
    before = fisher.estimate(model, data).metadata["model"]
    assert fisher.estimate(model, data).metadata["model"] == before
    with torch.no_grad():
        model[0].weight[0, 0, 0, 0] += 1e-3
    assert fisher.estimate(model, data).metadata["model"] != before


def test_a_missing_file_and_a_later_format_are_refused(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="There is no file"):
        fisher.load(tmp_path / "nothing")
    later = {"kind": "Fisher blocks", "version": 99, "layers": [], "metadata": {}}
    tensor_files.write(tmp_path / "later", {}, later)
    with pytest.raises(ValueError, match=r"version 99 of the format.*Update tekfac"):
        fisher.load(tmp_path / "later")


def test_others_may_read_what_is_saved(tmp_path: Path) -> None:
    (tmp_path / "plain").write_text("")
    fisher.save(fisher.estimate(*model_and_data()), tmp_path / "blocks.safetensors")
    assert (tmp_path / "blocks.safetensors").stat().st_mode == (tmp_path / "plain").stat().st_mode


def test_what_cannot_be_written_leaves_the_earlier_file_as_it_was(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "blocks.safetensors"
    blocks = fisher.estimate(*model_and_data())
    fisher.save(blocks, path)
    before = path.read_bytes()

    def full(tensors: Any, file: Path, metadata: Any) -> None:
        file.write_bytes(b"a part of it")
        raise SafetensorError("No space left on device")

    monkeypatch.setattr("safetensors.torch.save_file", full)
    with pytest.raises(OSError, match=r"Cannot write.*No space left on device; the earlier one is untouched"):
        fisher.save(blocks, path)
    assert path.read_bytes() == before
    assert list(tmp_path.iterdir()) == [path]


def test_layers_of_strange_names_are_told_apart(tmp_path: Path) -> None:
    shape = fisher.estimate(*model_and_data())["2"].shape
    blocks = [
        fisher.DenseBlock(replace(shape, name=name), torch.full((1, shape.size, shape.size), float(index)))
        for index, name in enumerate(("a", "a/b", "a::b", "0/a", ""))
    ]
    fisher.save(fisher.BlockDiagonal(blocks), tmp_path / "blocks.safetensors")
    loaded = fisher.load(tmp_path / "blocks.safetensors")
    assert [float(block.to_dense()[0, 0]) for block in loaded.values()] == [0.0, 1.0, 2.0, 3.0, 4.0]
    with pytest.raises(ValueError, match="Two blocks of the same layer"):
        fisher.BlockDiagonal([blocks[0], blocks[0]])
