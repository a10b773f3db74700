"""Two hosts on a slow link train one run: network namespaces of this machine, which only root can make."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

HOSTS = ("tekfac-one", "tekfac-two")
LINKS = ("tekfac-link-1", "tekfac-link-2")
ADDRESSES = ("10.213.7.1", "10.213.7.2")
PORT = "29512"
SPEED = "20mbit"
TASK = [
    *("--model", "mlp", "--model-option", "width=8", "--train-samples", "320", "--test-samples", "90"),
    *("--batch-size", "32", "--epochs", "2", "--seed", "0", "--lr", "0.05"),
    *("--option", "interval_growth=None", "--option", "factors_every=2", "--option", "basis_every=2"),
    *("--option", "rescaling=measured", "--option", "power=1", "--option", "damping=0.1"),
]

pytestmark = pytest.mark.slow


def ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True, text=True)


@pytest.fixture
def hosts() -> Iterator[bool]:
    """Two namespaces with a link between them; whether it is a slow one."""
    if sys.platform != "linux" or os.geteuid() or not shutil.which("ip"):
        pytest.skip("needs Linux, root and ip of iproute2")
    try:
        ip("netns", "add", HOSTS[0])
    except subprocess.CalledProcessError as error:
        pytest.skip(f"this machine lets nobody make network namespaces: {error.stderr.strip()}")
    try:
        ip("netns", "add", HOSTS[1])
        ip("link", "add", LINKS[0], "type", "veth", "peer", "name", LINKS[1])
        for host, link, address in zip(HOSTS, LINKS, ADDRESSES, strict=True):
            ip("link", "set", link, "netns", host)
            ip("-n", host, "addr", "add", f"{address}/24", "dev", link)
            ip("-n", host, "link", "set", link, "up")
            ip("-n", host, "link", "set", "lo", "up")
        are_slow = [slowed(host, link) for host, link in zip(HOSTS, LINKS, strict=True)]
        yield all(are_slow)
    finally:
        for host in HOSTS:
            subprocess.run(["ip", "netns", "del", host], capture_output=True, check=False)


def slowed(host: str, link: str) -> bool:
    """Let a link have no more than SPEED, where the kernel can do that."""
    if not shutil.which("tc"):
        return False
    limit = ["tc", "-n", host, "qdisc", "add", "dev", link, "root", "tbf", "rate", SPEED]
    done = subprocess.run([*limit, "burst", "32kbit", "latency", "100ms"], capture_output=True, check=False)
    return done.returncode == 0


def environment(**more: str) -> dict[str, str]:
    return {**os.environ, "OMP_NUM_THREADS": "1", **more}


def on_host(place: int, folder: Path) -> subprocess.Popen[str]:
    own = environment(
        MASTER_ADDR=ADDRESSES[0],
        MASTER_PORT=PORT,
        WORLD_SIZE="2",
        RANK=str(place),
        LOCAL_RANK="0",
        GLOO_SOCKET_IFNAME=LINKS[place],
    )
    command = ["ip", "netns", "exec", HOSTS[place], sys.executable, "-m", "tekfac", "train", *TASK]
    return subprocess.Popen(
        [*command, "--out", "hosts"],
        cwd=folder,
        env=own,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def test_the_run_is_that_of_two_processes_of_one_host(hosts: bool, tmp_path: Path) -> None:
    started = [on_host(place, tmp_path) for place in range(2)]
    ended = [process.communicate(timeout=240) for process in started]
    assert [process.returncode for process in started] == [0, 0], ended
    here = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", "-m"]
    subprocess.run(
        [*here, "tekfac", "train", *TASK, "--out", "here"],
        cwd=tmp_path,
        env=environment(GLOO_SOCKET_IFNAME="lo"),
        check=True,
        capture_output=True,
        timeout=240,
    )
    found, expected = (torch.load(tmp_path / run / "model.pt", weights_only=True) for run in ("hosts", "here"))
    assert all(torch.equal(found[name], own) for name, own in expected.items())
    if not hosts:
        pytest.skip(f"the weights are the same, but tc cannot slow the link down to {SPEED} here")
