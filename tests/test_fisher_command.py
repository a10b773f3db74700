"""Promise: `tekfac fisher` turns a network and data, or checkpoints, into a table, files and figures."""

from __future__ import annotations

import csv
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from tekfac.cli import fisher_demo
from tekfac.cli.main import main

SOURCE = """
import torch
from torch import nn

def make():
    return nn.Sequential(nn.Conv2d(1, 3, 3), nn.ReLU(), nn.Flatten(), nn.Linear(12, 4))

def loader():
    generator = torch.Generator().manual_seed(0)
    return [(torch.randn(5, 1, 4, 4, generator=generator), torch.randint(4, (5,), generator=generator))] * 3

def nothing():
    return []

def no_network():
    return 3

def once():
    yield from loader()

def breaks():
    return nn.Linear(2, 2)

def zero():
    model = make()
    nn.init.zeros_(model[3].weight)
    return model

class Heads(nn.Module):
    def __init__(self):
        super().__init__()
        self.body, self.cls, self.box = nn.Linear(4, 3), nn.Linear(3, 4), nn.Linear(3, 2)

    def forward(self, x):
        hidden = self.body(x).tanh()
        return {"cls": self.cls(hidden), "box": self.box(hidden)}

def boxes():
    x = torch.randn(8, 4, generator=torch.Generator().manual_seed(0))
    return [(x, {"cls": torch.arange(8) % 4, "box": x[:, :2]})] * 2

def loss(model, batch):
    out = model(batch[0])
    losses = nn.functional.cross_entropy(out["cls"], batch[1]["cls"])
    return losses + nn.functional.mse_loss(out["box"], batch[1]["box"])

def imports_later():
    import neighbour
    return neighbour.make()
"""


@pytest.fixture
def user(tmp_path: Path) -> Path:
    """A user's file with a network and data, and two checkpoints of it."""
    path = tmp_path / "mine.py"
    path.write_text(SOURCE)
    names: dict[str, Any] = {}
    exec(SOURCE, names)
    torch.manual_seed(0)
    torch.save(names["make"]().state_dict(), tmp_path / "early.pt")
    torch.save({"epoch": 3, "model": names["make"]().state_dict()}, tmp_path / "late.pt")
    torch.save({"epoch": 3}, tmp_path / "empty.pt")
    return path


def run(user: Path, *arguments: str, model: str = "make", data: str = "loader") -> int:
    out = str(user.parent / "out")
    return main(["fisher", "--model", f"{user}:{model}", "--data", f"{user}:{data}", "--out", out, *arguments])


def test_a_network_and_data_give_a_table_files_and_figures(
    user: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(user) == 0
    printed, out = capsys.readouterr().out, user.parent / "out"
    assert "‖F − F̂‖ / ‖F‖" in printed
    assert "theorem     ‖F − TEKFAC‖ ≤ ‖F − TKFAC‖: held in 2 of 2 cases" in printed
    assert "identity    tr TKFAC = tr F: held in 2 of 2 cases" in printed
    assert "no theorem  ‖F − TKFAC‖ ≤ ‖F − KFAC‖: held in" in printed
    rows = list(csv.DictReader((out / "comparison.csv").read_text(encoding="utf-8").splitlines()))
    assert [(row["layer"], row["approximation"]) for row in rows] == [
        (layer, method) for layer in ("0", "3") for method in ("KFAC", "EKFAC", "TKFAC", "TEKFAC")
    ]
    plain = json.loads((out / "comparison.json").read_text(encoding="utf-8"))
    (point,) = plain["points"].values()
    assert [row["error"] for row in point["rows"]] == [float(row["error"]) for row in rows]
    assert point["metadata"]["samples"] == 15
    assert len(plain["findings"]) == 7
    for figure in ("errors", "angles", "spectra", "heat-map"):
        assert (out / f"{figure}.png").read_bytes().startswith(b"\x89PNG")
        assert (out / f"{figure}.pdf").read_bytes().startswith(b"%PDF")
    assert not (out / "training.png").exists()


def test_checkpoints_give_the_errors_along_training(user: Path, capsys: pytest.CaptureFixture[str]) -> None:
    states = [str(user.parent / name) for name in ("early.pt", "late.pt")]
    assert run(user, "--state", *states, "--methods", "kfac", "kfac:reduce", "tekfac") == 0
    out = user.parent / "out"
    rows = list(csv.DictReader((out / "comparison.csv").read_text(encoding="utf-8").splitlines()))
    assert [row["point"] for row in rows] == ["early"] * 6 + ["late"] * 6
    assert {row["approximation"] for row in rows} == {"KFAC", "KFAC (reduce)", "TEKFAC"}
    assert rows[0]["error"] != rows[6]["error"]
    assert (out / "training.png").exists()
    assert "late" in capsys.readouterr().out


def test_the_samples_are_counted_and_the_rest_is_left_out(user: Path) -> None:
    assert run(user, "--samples", "7", "--no-figures", "--layers", "3", "--float32") == 0
    plain = json.loads((user.parent / "out" / "comparison.json").read_text(encoding="utf-8"))
    (point,) = plain["points"].values()
    assert point["metadata"]["samples"] == 7
    assert {row["layer"] for row in point["rows"]} == {"3"}
    assert not (user.parent / "out" / "errors.png").exists()


@pytest.mark.slow
def test_large_layers_are_measured_by_probes(user: Path, capsys: pytest.CaptureFixture[str]) -> None:
    layers = "nn.Flatten(), nn.Linear(16, 300), nn.ReLU(), nn.Linear(300, 4)"
    user.write_text(f"{SOURCE}\ndef wide():\n    return nn.Sequential({layers})\n")
    assert run(user, "--exact-memory", "1", model="wide") == 0
    printed = capsys.readouterr().out
    assert "probes" in printed
    assert "[0." in printed


def test_without_a_network_it_trains_one_on_digits(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = str(tmp_path / "out")
    assert main(["fisher", "--samples", "40", "--layers", "conv1", "--no-figures", "--out", out]) == 0
    plain = json.loads((tmp_path / "out" / "comparison.json").read_text(encoding="utf-8"))
    points = list(plain["points"])
    assert [point.split(" (")[0] for point in points] == [f"epoch {epoch}" for epoch in (0, 1, 2, 4, 8)]
    accuracy = float(points[-1].split("(")[1].split("%")[0])
    assert accuracy > 95
    assert "The digits CNN" in capsys.readouterr().out


def test_the_digits_network_has_blocks_that_can_be_formed() -> None:
    sizes = [p.numel() for p in fisher_demo.network().parameters()]
    assert max(sizes) < 4096


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (["--methods", "sgd"], "Unknown method: 'sgd'. Expected one of kfac, ekfac, tkfac, tekfac"),
        (["--layers", "conv9"], "No layer 'conv9' with a Fisher block. The layers are '0', '3'"),
        (["--state", "nowhere.pt"], "There is no checkpoint 'nowhere.pt'"),
        (["--damping", "-1"], "Invalid damping: -1.0"),
        (["--probes", "2"], "Invalid probes: 2. Expected at least 8"),
        (["--heat-map", "conv9"], "No layer 'conv9'"),
    ],
)
def test_bad_input_is_said_in_one_line(
    user: Path, arguments: list[str], named: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(user, *arguments) == 1
    error = capsys.readouterr().err.splitlines()[-1]
    assert error.startswith("tekfac: ")
    assert named in error


@pytest.mark.parametrize(
    ("model", "data", "named"),
    [
        ("nets", "loader", "has no function 'nets' for model. Expected one of make, loader"),
        ("no_network", "loader", "returned a int. Expected an nn.Module"),
        ("make", "nothing", "The loader is empty"),
        ("make", "once", "returned a generator. Expected batches that can be read several times"),
        ("breaks", "loader", "RuntimeError: mat1 and mat2 shapes cannot be multiplied"),
    ],
)
def test_a_bad_source_is_said_in_one_line(
    user: Path, model: str, data: str, named: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(user, model=model, data=data) == 1
    assert named in capsys.readouterr().err


def test_sources_that_cannot_be_found_are_named(user: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for arguments, named in (
        (["--model", "no.such:thing", "--data", f"{user}:loader"], "Cannot import 'no.such' for model"),
        (["--model", "nets.py:thing", "--data", f"{user}:loader"], "no file 'nets.py'"),
        (["--model", "thing", "--data", f"{user}:loader"], "Unknown model: 'thing'"),
        (["--model", f"{user}:make"], "--model needs --data"),
        (["--data", f"{user}:loader"], "--data needs --model"),
    ):
        assert main(["fisher", *arguments]) == 1
        assert named in capsys.readouterr().err


def test_a_checkpoint_without_parameters_is_refused(user: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(user, "--state", str(user.parent / "empty.pt")) == 1
    assert "holds no state dict: it is a dict of ['epoch']" in capsys.readouterr().err
    for name, content in (("text.pt", b"hello"), ("empty.bin", b"")):
        (user.parent / name).write_bytes(content)
        assert run(user, "--state", str(user.parent / name)) == 1
        assert f"{name}' is no checkpoint of tensors" in capsys.readouterr().err
    torch.save([1, 2], user.parent / "list.pt")
    assert run(user, "--state", str(user.parent / "list.pt")) == 1
    assert "holds no state dict: it is list" in capsys.readouterr().err
    early = str(user.parent / "early.pt")
    assert run(user, "--state", early, early) == 1
    assert "names a file twice" in capsys.readouterr().err


def test_a_missing_package_is_named_with_its_extra(
    user: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    assert run(user) == 1
    assert "needs matplotlib, which is not installed" in capsys.readouterr().err
    assert run(user, "--no-figures") == 0


def test_the_command_is_installed_and_can_be_asked_for_help() -> None:
    for command in ([sys.executable, "-m", "tekfac"], [str(Path(sys.executable).parent / "tekfac")]):
        out = subprocess.run([*command, "fisher", "--help"], capture_output=True, text=True, check=True).stdout
        assert "--model" in out
        assert "--state" in out


def test_checkpoints_of_the_same_name_are_told_apart(user: Path) -> None:
    states = []
    for name in ("first", "second"):
        (user.parent / name).mkdir()
        path = user.parent / name / "model.pt"
        path.write_bytes((user.parent / ("early.pt" if name == "first" else "late.pt")).read_bytes())
        states.append(str(path))
    assert run(user, "--state", *states, "--no-figures") == 0
    text = (user.parent / "out" / "comparison.csv").read_text(encoding="utf-8")
    assert {row["point"] for row in csv.DictReader(text.splitlines())} == set(states)


def test_a_whole_model_as_checkpoint_is_refused(user: Path, capsys: pytest.CaptureFixture[str]) -> None:
    torch.save(torch.nn.Linear(2, 2), user.parent / "whole.pt")
    assert run(user, "--state", str(user.parent / "whole.pt")) == 1
    assert "no checkpoint of tensors that can be read safely" in capsys.readouterr().err


@pytest.mark.slow
def test_a_layer_without_gradients_is_left_out_of_the_figures(user: Path) -> None:
    assert run(user, model="zero") == 0
    assert (user.parent / "out" / "spectra.png").exists()


def test_a_users_file_may_import_its_neighbours_when_it_is_called(user: Path) -> None:
    (user.parent / "neighbour.py").write_text("from mine import make\n")
    assert run(user, "--no-figures", model="imports_later") == 0


def test_modules_of_the_current_folder_are_found(user: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (user.parent / "nearby_nets.py").write_text(SOURCE)
    monkeypatch.chdir(user.parent)
    sources = ["--model", "nearby_nets:make", "--data", "nearby_nets:loader"]
    assert main(["fisher", *sources, "--no-figures", "--out", "here"]) == 0
    assert (user.parent / "here" / "comparison.csv").exists()


def test_debug_shows_where(user: Path) -> None:
    sources = ["--model", f"{user}:breaks", "--data", f"{user}:loader", "--out", str(user.parent / "out")]
    with pytest.raises(RuntimeError, match="mat1 and mat2"):
        main(["--debug", "fisher", *sources])


def test_the_report_says_the_command(user: Path) -> None:
    assert run(user, "--no-figures", "--samples", "5") == 0
    plain = json.loads((user.parent / "out" / "comparison.json").read_text(encoding="utf-8"))
    assert plain["command"].startswith("tekfac fisher --model")
    assert plain["command"].endswith("--no-figures --samples 5")


def test_a_heat_map_of_what_has_no_block_is_refused_before_anything_is_measured(
    user: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(user, "--heat-map", "1") == 1  # the ReLU
    assert "No layer '1' for --heat-map. The layers are 0, 3" in capsys.readouterr().err
    assert not (user.parent / "out" / "comparison.csv").exists()


def test_a_closed_pipe_ends_it_quietly(user: Path) -> None:
    command = [
        sys.executable,
        "-m",
        "tekfac",
        "fisher",
        "--model",
        f"{user}:make",
        "--data",
        f"{user}:loader",
    ]
    out = ["--out", str(user.parent / "out"), "--no-figures"]
    process = subprocess.Popen([*command, *out], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert process.stderr is not None
    process.stdout.close()
    errors = process.stderr.read()
    process.stderr.close()
    process.wait()
    assert "BrokenPipe" not in errors
    assert "Exception" not in errors
    assert (user.parent / "out" / "comparison.csv").exists()


def metadata(user: Path) -> Any:
    plain = json.loads((user.parent / "out" / "comparison.json").read_text(encoding="utf-8"))
    (point,) = plain["points"].values()
    return point["metadata"]


def test_several_predictions_have_their_likelihoods_by_name_or_from_a_loss(user: Path) -> None:
    about = {"model": "Heads", "data": "boxes"}
    assert run(user, "--no-figures", "--likelihood", "cls=categorical", "box=gaussian", **about) == 0
    assert metadata(user)["likelihood"] == {"box": "gaussian", "cls": "categorical"}
    assert metadata(user)["terms"] == {"box": 32, "cls": 16}
    assert run(user, "--no-figures", "--loss", f"{user}:loss", **about) == 0
    assert metadata(user)["likelihood"]["box"] == "Gaussian(variance=0.5, masked=True)"


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (["--likelihood", "gausian"], r"'gausian' is unknown. Did you mean 'gaussian'?"),
        (
            ["--likelihood", "box=normal"],
            "'normal' is unknown. Expected one of auto, categorical, bernoulli, gaussian",
        ),
        (["--likelihood", "gaussian", "cls=categorical"], "got gaussian cls=categorical. Expected one for all"),
    ],
    ids=["unknown", "unknown by name", "mixed"],
)
def test_a_likelihood_that_cannot_be_read_is_refused(
    user: Path, arguments: list[str], named: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(user, *arguments) != 0
    assert named in capsys.readouterr().err


def test_a_loss_without_a_network_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["fisher", "--loss", "mine.py:loss"]) != 0
    assert "--loss needs --model" in capsys.readouterr().err
