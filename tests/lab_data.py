"""Small data sets in the official layouts, and a server for them."""

from __future__ import annotations

import io
import pickle
import struct
import tarfile
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from scipy.io import savemat

from tekfac.lab.data.catalogue import Known, Layout
from tekfac.lab.data.images import Images

SHARED = Path(__file__).parent.parent.parent / "shared" / "data"


def random_images(count: int, classes: int, seed: int = 0) -> Images:
    """Colour images of 32x32, with labels of all classes in turn."""
    generator = torch.Generator().manual_seed(seed)
    pixels = torch.randint(256, (count, 3, 32, 32), generator=generator, dtype=torch.uint8)
    return Images(pixels, torch.arange(count) % classes)


# -- python ---------------------------------------------------------------------------------------------------


def python2_pickle(images: Images, key: str = "labels") -> bytes:
    """A batch as Python 2 and its NumPy pickled it, instruction by instruction, like the official files."""

    def text(value: bytes) -> bytes:
        return b"U" + bytes([len(value)]) + value

    labels = b"".join(b"K" + bytes([label]) for label in images.labels.tolist())
    raw = images.pixels.numpy().tobytes()
    shape = b"M" + struct.pack("<H", len(images)) + b"M" + struct.pack("<H", 3072)
    array = (
        b"cnumpy.core.multiarray\n_reconstruct\nq\x01(cnumpy\nndarray\nK\x00\x85"
        + text(b"b")
        + b"tR(K\x01"
        + shape
        + b"\x86cnumpy\ndtype\n("
        + text(b"u1")
        + b"K\x00K\x01tR(K\x03"
        + text(b"|")
        + b"NNNJ\xff\xff\xff\xffJ\xff\xff\xff\xffK\x00tb\x89T"
        + struct.pack("<i", len(raw))
        + raw
        + b"tb"
    )
    entries = text(b"batch_label") + text(b"batch 1 of 1") + text(key.encode()) + b"](" + labels + b"e"
    return b"\x80\x02}(" + entries + text(b"data") + array + b"u."


def python3_pickle(images: Images, key: str = "labels", protocol: int = 2) -> bytes:
    """A batch as Python 3 pickles it."""
    data = images.pixels.numpy().reshape(len(images), -1)
    return pickle.dumps({b"data": data, key.encode(): images.labels.tolist()}, protocol=protocol)


def label_key(known: Known) -> str:
    return "fine_labels" if known.name == "cifar100" else "labels"


# -- all layouts ----------------------------------------------------------------------------------------------


def parts(known: Known, layout: Layout, count: int) -> dict[str, Images]:
    """Images for each file of images: `count` a file, the same every time."""
    files = layout.of("train", "test")
    return {file.name: random_images(count, len(known.classes), seed) for seed, file in enumerate(files)}


def write_set(known: Known, layout: Layout, folder: Path, count: int = 12) -> dict[str, Images]:
    """Write a small set in an official layout, and return the images of each of its files."""
    folder.mkdir(parents=True, exist_ok=True)
    found = parts(known, layout, count)
    for name, content in contents(known, layout, found).items():
        (folder / name).write_bytes(content)
    return found


def contents(known: Known, layout: Layout, images: Mapping[str, Images]) -> dict[str, bytes]:
    """The bytes of every file of a layout."""
    out = {}
    for file in layout.files:
        if file.role in ("train", "test"):
            out[file.name] = content(known, layout, images[file.name])
        elif layout.kind == "python":
            key = b"fine_label_names" if known.name == "cifar100" else b"label_names"
            out[file.name] = pickle.dumps({key: [name.encode() for name in known.classes]}, protocol=2)
        else:
            out[file.name] = "\n".join((*known.classes, "")).encode()
    return out


def content(known: Known, layout: Layout, images: Images) -> bytes:
    """The bytes of a file of images."""
    if layout.kind == "python":
        return python2_pickle(images, label_key(known))
    if layout.kind == "mat":
        digits = torch.where(images.labels == 0, 10, images.labels).numpy().astype(np.uint8)
        file = io.BytesIO()
        savemat(
            file, {"X": images.pixels.permute(2, 3, 1, 0).numpy(), "y": digits[:, None]}, do_compression=True
        )
        return file.getvalue()
    labels = images.labels[:, None].to(torch.uint8)
    coarse = [labels // 5] if known.name == "cifar100" else []
    return torch.cat([*coarse, labels, images.pixels.flatten(1)], dim=1).numpy().tobytes()


def archive(path: Path, members: Mapping[str, bytes], mode: Any = "w:gz") -> Path:
    """An archive with these members."""
    with tarfile.open(path, mode) as tar:
        for name, raw in members.items():
            member = tarfile.TarInfo(name)
            member.size = len(raw)
            tar.addfile(member, io.BytesIO(raw))
    return path


def draw(path: Path, colour: int | tuple[int, int, int], size: tuple[int, int] = (6, 4)) -> None:
    """An image of one colour; grey, if the colour is one number."""
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.new("L" if isinstance(colour, int) else "RGB", size, colour).save(path)


def classes(folder: Path, count: int, *names: str) -> None:
    """Folders of images of classes, each image with a brightness of its own."""
    for label, name in enumerate(names):
        for number in range(count):
            draw(folder / name / f"{number:02}.png", 100 * label + number)


# -- a server -------------------------------------------------------------------------------------------------


@dataclass
class Server:
    """What a server has and does, and what it was asked for."""

    files: dict[str, bytes]
    address: str = ""
    stops_after: int | None = None
    asked: list[str] = field(default_factory=list)


class _Handler(BaseHTTPRequestHandler):
    def __init__(self, server_state: Server, *arguments: Any) -> None:
        self.state = server_state
        super().__init__(*arguments)

    def do_GET(self) -> None:
        name = self.path.lstrip("/")
        self.state.asked.append(name)
        raw = self.state.files.get(name)
        if raw is None:
            self.send_error(404)
            return
        self.send_response(200)
        self.send_header("Content-Length", str(len(raw)))
        self.end_headers()
        self.wfile.write(raw[: self.state.stops_after])

    def log_message(self, *arguments: Any) -> None:
        """Say nothing."""


@contextmanager
def serving(files: dict[str, bytes], **options: Any) -> Iterator[Server]:
    """A server on this machine."""
    state = Server(files, **options)
    with ThreadingHTTPServer(("127.0.0.1", 0), partial(_Handler, state)) as server:
        state.address = f"http://127.0.0.1:{server.server_address[1]}"
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        try:
            yield state
        finally:
            server.shutdown()
            thread.join()
