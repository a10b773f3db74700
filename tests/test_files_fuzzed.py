"""Promise: no damaged file is taken for a whole one with other numbers, nor crashes or hangs what reads it."""

from __future__ import annotations

import random
import shutil
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from tekfac import fisher
from tekfac.fisher import tensor_files
from tekfac.fisher.checkpoint import KIND
from tekfac.lab import sealed_files
from tekfac.lab.config import RunConfig
from tekfac.lab.interruption import Interrupted
from tekfac.lab.run_folder import RunFolder, read_plain
from tekfac.lab.training import train

pytestmark = pytest.mark.slow  # every test reads thousands of files

SECONDS = 5.0
"""That reading a file of some kilobytes may take, on a busy machine."""

CONFIG = RunConfig(
    model="mlp",
    model_options={"width": 8},
    train_samples=100,
    test_samples=50,
    epochs=2,
    batch_size=50,
    optimizer="tekfac",
    threads=1,
    options={"interval_growth": None},
)

TOML = """
data = "digits"
model = "mlp"
optimizer = "tekfac"
lr = 0.03
epochs = 20
seed = 7
schedule = "cosine"
[model_options]
width = 16
[options]
kl_clip = 1e-3
factors_every = 20
interval_growth = "None"
betas = [0.9, 0.99]
"""


@dataclass(frozen=True)
class Loader:
    """A way to read a file.

    Attributes:
        file: its name.
        read: gives all numbers and texts that are read, from the folder of the file.
        is_whole: whether what a mutated file gave may be accepted, with what the whole one gives.
    """

    file: str
    read: Callable[[Path], Any]
    is_whole: Callable[[Any, Any], bool]


def same(found: Any, whole: Any) -> bool:
    """Bit by bit, tensors included."""
    if isinstance(whole, torch.Tensor):
        alike = isinstance(found, torch.Tensor) and found.dtype == whole.dtype and found.shape == whole.shape
        return alike and found.numpy().tobytes() == whole.numpy().tobytes()
    if type(found) is not type(whole):
        return False
    if isinstance(whole, dict):
        return found.keys() == whole.keys() and all(same(found[key], whole[key]) for key in whole)
    if isinstance(whole, list | tuple):
        return len(found) == len(whole) and all(map(same, found, whole))
    return bool(found == whole)


def shortened(found: Any, whole: Any) -> bool:
    """The first lines of a log, as they were; the last ones may have been lost."""
    return same(found, whole[: len(found)])


def anything(found: Any, whole: Any) -> bool:
    """A file of the user's own: other numbers are other wishes, but what is read is whole and sound."""
    return isinstance(found, RunConfig)


def blocks_in(path: Path) -> dict[str, Any]:
    blocks = fisher.load(path)
    parts = {name: [*block.basis, block.theta] for name, block in blocks.items()}  # type: ignore[attr-defined]
    return {"metadata": dict(blocks.metadata), "parts": parts}


LOADERS = {
    "checkpoint": Loader("checkpoint.pt", lambda folder: RunFolder(folder).load(CONFIG), same),
    "weights": Loader("model.pt", lambda folder: sealed_files.read(folder / "model.pt"), same),
    "run": Loader("run.json", lambda folder: RunFolder(folder).config().plain(), same),
    "result": Loader("result.json", lambda folder: RunFolder(folder).result(), same),
    "config of a run": Loader(
        "run.json", lambda folder: RunConfig.from_plain(read_plain(folder), "run.json").plain(), same
    ),
    "epochs": Loader(
        "epochs.jsonl", lambda folder: [line.plain() for line in RunFolder(folder).epochs()], shortened
    ),
    "layers": Loader(
        "curvature.jsonl", lambda folder: [line.plain() for line in RunFolder(folder).layers()], shortened
    ),
    "blocks": Loader("blocks.safetensors", lambda folder: blocks_in(folder / "blocks.safetensors"), same),
    "survey": Loader("survey", lambda folder: tensor_files.read(folder / "survey", KIND), same),
    "settings": Loader(
        "my.toml", lambda folder: RunConfig.from_plain(read_plain(folder / "my.toml"), "my.toml"), anything
    ),
}


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with one whole file of every kind."""
    folder = tmp_path_factory.mktemp("whole")

    def stop(at: Any) -> None:
        if at.step == 3:
            raise Interrupted("stopped", 2)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("tekfac.lab.training.WATCH_SECONDS", 0.0)
        with pytest.raises(Interrupted):
            train(CONFIG, folder, checkpoint_seconds=0, watch=stop)
    ended = tmp_path_factory.mktemp("ended")
    train(CONFIG, ended)
    for name in ("model.pt", "result.json"):
        shutil.copy(ended / name, folder / name)
    (folder / "checkpoint.previous.pt").unlink()
    (folder / "my.toml").write_text(TOML)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 4), nn.Tanh(), nn.Linear(4, 3))
    data = [(torch.randn(6, 5), torch.randint(3, (6,)))]
    survey = folder / "survey"
    blocks = fisher.estimate(model, data, fisher="sampled", checkpoint=survey, checkpoint_seconds=0)
    fisher.save(blocks, folder / "blocks.safetensors")
    return folder


def mutated(raw: bytes, drawn: random.Random) -> bytes:
    """A copy with a bit flipped, cut off, with two bytes exchanged, or with a piece lost, doubled or zeroed."""
    own, size = bytearray(raw), len(raw)
    match drawn.choice(["bit"] * 4 + ["cut", "swap", "swap", "byte", "lost", "doubled", "zeroed"]):
        case "bit":
            own[drawn.randrange(size)] ^= 1 << drawn.randrange(8)
        case "cut":
            del own[drawn.randrange(size) :]
        case "swap":
            one, other = drawn.randrange(size), drawn.randrange(size)
            own[one], own[other] = own[other], own[one]
        case "byte":
            own[drawn.randrange(size)] = drawn.randrange(256)
        case kind:
            begin = drawn.randrange(size)
            end = min(size, begin + drawn.randint(1, 64))
            own[begin:end] = {"lost": b"", "doubled": 2 * own[begin:end], "zeroed": bytes(end - begin)}[kind]
    return bytes(own)


def flipped(raw: bytes, drawn: random.Random, count: int) -> Iterator[bytes]:
    """Copies of a file, in each of which another bit is flipped."""
    for place in drawn.sample(range(8 * len(raw)), min(count, 8 * len(raw))):
        own = bytearray(raw)
        own[place // 8] ^= 1 << place % 8
        yield bytes(own)


def refused_or_same(loader: Loader, folder: Path, content: bytes, whole: Any) -> bool:
    """Whether a mutated file was refused; one that was accepted gave what the whole one does."""
    path = folder / loader.file
    path.write_bytes(content)
    began = time.monotonic()
    try:
        found = loader.read(folder)
    except (ValueError, OSError) as error:
        said = str(error)
        assert path.name in said, said
        assert len(said) < 2000
        return True
    finally:
        assert time.monotonic() - began < SECONDS
    assert loader.is_whole(found, whole), content
    return False


@pytest.mark.parametrize("name", LOADERS)
def test_no_mutated_file_gives_other_numbers(name: str, files: Path, tmp_path: Path) -> None:
    loader, folder = LOADERS[name], tmp_path / "run"
    shutil.copytree(files, folder)
    raw, drawn = (folder / loader.file).read_bytes(), random.Random(name)
    whole = loader.read(folder)
    contents = (mutated(raw, drawn) for _ in range(1200))
    changed = [content for content in contents if content != raw]
    refused = sum(refused_or_same(loader, folder, content, whole) for content in changed)
    assert len(changed) >= 1000
    assert refused > len(changed) / 4


@pytest.mark.parametrize("name", ["run", "result", "epochs"])
def test_no_single_bit_of_a_text_gives_other_numbers(name: str, files: Path, tmp_path: Path) -> None:
    loader, folder = LOADERS[name], tmp_path / "run"
    shutil.copytree(files, folder)
    whole, raw = loader.read(folder), (folder / loader.file).read_bytes()
    contents = list(flipped(raw, random.Random(name), 1500))
    refused = sum(refused_or_same(loader, folder, content, whole) for content in contents)
    assert refused > 0.9 * len(contents)


@pytest.mark.parametrize("name", ["checkpoint", "weights", "blocks", "survey"])
def test_no_single_bit_of_a_sealed_file_is_accepted(name: str, files: Path, tmp_path: Path) -> None:
    loader, folder = LOADERS[name], tmp_path / "run"
    shutil.copytree(files, folder)
    whole, raw = loader.read(folder), (folder / loader.file).read_bytes()
    for content in flipped(raw, random.Random(name), 1000):
        assert refused_or_same(loader, folder, content, whole)
