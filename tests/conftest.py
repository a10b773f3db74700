"""One thread and one seed per test, so that every run of the suite computes the same numbers."""

from __future__ import annotations

import zlib
from collections.abc import Iterator

import pytest
import torch

from thinning import pytest_collection_modifyitems

__all__ = ["pytest_collection_modifyitems", "reproducible"]


@pytest.fixture(autouse=True)
def reproducible(request: pytest.FixtureRequest) -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    torch.manual_seed(zlib.crc32(request.node.name.encode()))
    yield
    torch.set_num_threads(threads)
