"""Promise: a Fisher file that is not as it was written is refused by name; whole, any program can read it."""

from __future__ import annotations

import json
import random
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

from tekfac import fisher
from tekfac.cli.fisher_sources import load_state
from tekfac.fisher import tensor_files
from tekfac.lab import sealed_files

DATA = [(torch.randn(6, 5), torch.tensor([0, 1, 2, 0, 1, 2])) for _ in range(2)]


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(5, 4), nn.Tanh(), nn.Linear(4, 3))


def estimate(path: Path | None = None) -> Any:
    return fisher.estimate(network(), DATA, fisher="sampled", checkpoint=path, checkpoint_seconds=0)


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    """What a file of blocks and that of a survey hold."""
    folder = tmp_path_factory.mktemp("fisher")
    blocks = estimate(folder / "survey")
    fisher.save(blocks, folder / "blocks")
    return {name: (folder / name).read_bytes() for name in ("blocks", "survey")}


def read(name: str, path: Path) -> Any:
    return fisher.load(path) if name == "blocks" else estimate(path)


@pytest.mark.parametrize("name", ["blocks", "survey"])
def test_any_single_bit_that_is_another_one_is_noticed(
    name: str, files: dict[str, bytes], tmp_path: Path
) -> None:
    path, whole = tmp_path / name, files[name]
    drawn = random.Random(0).sample(range(8 * len(whole)), 300)
    for bit in (*range(0, 800, 7), *drawn, 8 * len(whole) - 1):
        raw = bytearray(whole)
        raw[bit // 8] ^= 1 << bit % 8
        path.write_bytes(raw)
        with pytest.raises(
            ValueError, match=f"{name}' (is damaged|is not a safetensors|has no checksum|holds)"
        ):
            read(name, path)


@pytest.mark.parametrize("name", ["blocks", "survey"])
def test_what_is_cut_off_is_noticed(name: str, files: dict[str, bytes], tmp_path: Path) -> None:
    for size in (0, 4, 8, 100, len(files[name]) // 2, len(files[name]) - 1):
        (tmp_path / name).write_bytes(files[name][:size])
        with pytest.raises(ValueError, match=f"{name}'"):
            read(name, tmp_path / name)


def test_a_file_without_a_checksum_is_refused(files: dict[str, bytes], tmp_path: Path) -> None:
    """As an earlier version wrote them."""
    (tmp_path / "blocks").write_bytes(files["blocks"])
    with safe_open(tmp_path / "blocks", framework="pt") as file:
        tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        told = file.metadata()["tekfac"]
    save_file(tensors, tmp_path / "earlier", metadata={"tekfac": told})
    with pytest.raises(ValueError, match=r"earlier' has no checksum: it is of an earlier tekfac.*Make it anew"):
        fisher.load(tmp_path / "earlier")


@pytest.mark.parametrize("entry", ["version", "layers", "metadata"])
def test_a_file_that_lacks_something_is_refused_by_name(entry: str, tmp_path: Path) -> None:
    whole: dict[str, Any] = {"kind": "Fisher blocks", "version": 2, "layers": [], "metadata": {}}
    del whole[entry]
    tensor_files.write(tmp_path / "blocks", {}, whole)
    with pytest.raises(ValueError, match=r"blocks' (has version None|holds no whole blocks)"):
        fisher.load(tmp_path / "blocks")


@pytest.mark.parametrize("entry", ["signature", "records", "likelihoods"])
def test_a_survey_that_lacks_something_is_refused_by_name(
    entry: str, files: dict[str, bytes], tmp_path: Path
) -> None:
    path = tmp_path / "survey"
    path.write_bytes(files["survey"])
    tensors, metadata = tensor_files.read(path, "an unfinished survey")
    del metadata[entry]
    tensor_files.write(path, tensors, metadata)
    with pytest.raises(ValueError, match=r"survey (does not say of which survey|is no whole survey)"):
        estimate(path)


def test_a_text_that_looks_like_the_checksum_is_not_taken_for_it(tmp_path: Path) -> None:
    zeros = "0" * 64
    metadata = {"kind": "a kind", "text": f'"sha256":"{zeros}"', "sha256": zeros}
    tensor_files.write(tmp_path / "file", {"sha256": torch.arange(3.0)}, metadata)
    tensors, read_again = tensor_files.read(tmp_path / "file", "a kind")
    assert read_again == metadata
    assert torch.equal(tensors["sha256"], torch.arange(3.0))
    with safe_open(tmp_path / "file", framework="pt") as file:
        assert file.metadata()["sha256"] != zeros
        assert json.loads(file.metadata()["tekfac"]) == metadata


def test_blocks_may_be_saved_to_the_same_file_at_the_same_time(tmp_path: Path) -> None:
    path, writers, failures = tmp_path / "blocks", 8, []
    together = threading.Barrier(writers)

    def save(number: int) -> None:
        values: dict[str, Tensor] = {"values": torch.full((1000,), float(number))}
        together.wait(timeout=30)
        for _ in range(10):
            try:
                tensor_files.write(path, values, {"kind": "a kind"})
            except Exception as error:
                failures.append(error)

    threads = [threading.Thread(target=save, args=(number,)) for number in range(writers)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures
    assert len(set(tensor_files.read(path, "a kind")[0]["values"].tolist())) == 1
    assert list(tmp_path.iterdir()) == [path]


def test_weights_with_a_checksum_that_does_not_fit_are_not_loaded(tmp_path: Path) -> None:
    """Those that `tekfac train` wrote and `tekfac fisher --state` reads."""
    path, model = tmp_path / "model.pt", network()
    sealed_files.write(model.state_dict(), path)
    load_state(model, path)
    raw = bytearray(path.read_bytes())
    raw[len(raw) // 3] ^= 4
    path.write_bytes(raw)
    with pytest.raises(ValueError, match=r"model\.pt' is damaged"):
        load_state(model, path)
    torch.save(model.state_dict(), path)
    load_state(model, path)
