"""Promise: `optimizer.health()` tells how old and how good the curvature of layers is, and what to change."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from dense import METHODS, assert_close, statistics
from tekfac import KFAC, TEKFAC
from tekfac.cli.main import main
from tekfac.curvature.network import NetworkCurvature
from tekfac.lab.run_folder import RunFolder
from tekfac.lab.run_log import LayerEpoch
from tekfac.optim.natural_gradient import NaturalGradient
from training import (
    assert_identical,
    both_steps,
    cnn,
    everything,
    images,
    maker,
    mlp,
    saved_whole,
    through_a_file,
    train,
    vectors,
)

EVERY_STEP: dict[str, Any] = {"interval_growth": None, "factors_every": 1, "basis_every": 1}
FAILURE = torch.linalg.LinAlgError("linalg.eigh: the algorithm failed to converge")


def ages(optimizer: NaturalGradient, layer: str = "0") -> tuple[int | None, int | None, int | None]:
    own = optimizer.health()[layer]
    return own.age_of_factors, own.age_of_basis, own.age_of_rescaling


@both_steps
@pytest.mark.parametrize("method", METHODS)
def test_a_run_that_is_well_has_nothing_to_change(method: type[NaturalGradient], step: str) -> None:
    model = cnn()
    optimizer = maker(method, step)(model)
    assert optimizer.health().problems == ()
    train(model, optimizer, images(6))
    health = optimizer.health()
    assert health.problems == ()
    assert [own.layer for own in health.layers] == list(statistics(optimizer))
    assert all(own.advice == "" for own in health.layers)
    for own in health.layers:
        signals = optimizer.signals()[own.layer]
        assert (own.trace, own.damping, own.condition, own.failed_refreshes) == tuple(signals)


def test_ages_count_the_steps_since_each_was_refreshed() -> None:
    model = mlp()
    optimizer = TEKFAC.natural(model, lr=1e-3, factors_every=2, basis_every=4, rescaling_every=3)
    found = []
    for batch in vectors(7):
        train(model, optimizer, [batch])
        found.append(ages(optimizer))
    assert found == [(0, 0, 0), (1, 1, 1), (0, 2, 2), (1, 3, 0), (0, 0, 1), (1, 1, 2), (0, 2, 0)]


def test_what_is_not_measured_has_no_age() -> None:
    for optimizer, model in ((TEKFAC(m := mlp()), m), (KFAC.natural(m := mlp()), m)):
        assert ages(optimizer) == (None, None, None)
        train(model, optimizer, vectors(1))
        assert ages(optimizer) == (0, 0, None)


@both_steps
@pytest.mark.parametrize("method", METHODS)
def test_due_refreshes_that_bring_no_statistics_are_counted_and_told(
    method: type[NaturalGradient], step: str
) -> None:
    model = mlp()
    optimizer = maker(method, step)(model, **EVERY_STEP)
    train(model, optimizer, vectors(2))
    model.eval()
    for count in range(1, 5):
        train(model, optimizer, vectors(1))
        own = optimizer.health()["0"]
        assert own.empty_refreshes == own.age_of_factors == count
        assert own.age_of_basis == 0  # of the factors that there are
        assert bool(own.advice) == (count >= 3)
    problem, _ = optimizer.health().problems
    assert problem.kind == "no statistics"
    assert "last 4 due refreshes" in problem.advice
    assert "model.train()" in problem.advice
    model.train()
    train(model, optimizer, vectors(1))
    assert optimizer.health().problems == ()
    assert optimizer.health()["0"].empty_refreshes == 4


def test_layers_taking_turns_have_ages_of_their_own() -> None:
    model = mlp()
    optimizer = TEKFAC(model, turns=True, interval_growth=None, factors_every=4, basis_every=4)
    train(model, optimizer, vectors(9))
    assert ages(optimizer, "0")[0] != ages(optimizer, "2")[0]
    assert all(own.empty_refreshes == 0 for own in optimizer.health().layers)


def test_a_layer_that_was_never_seen_is_told_with_the_reason() -> None:
    model = nn.ModuleDict({"used": nn.Linear(5, 3), "other": nn.Linear(5, 3)}).double()
    model.forward = lambda x: model["used"](x) + 0 * model["other"].weight.sum()
    optimizer = TEKFAC(model, **EVERY_STEP)
    train(model, optimizer, vectors(2))
    (problem,) = optimizer.health().problems
    assert (problem.kind, problem.layer) == ("no statistics", "other")
    assert "its module was not called" in problem.advice
    own = optimizer.health()["other"]
    assert math.isnan(own.trace)
    assert own.age_of_factors is None
    assert own.empty_refreshes == 2


def test_frozen_layers_are_left_out() -> None:
    model = mlp()
    optimizer = TEKFAC(model, **EVERY_STEP)
    train(model, optimizer, vectors(1))
    for parameter in model[0].parameters():
        parameter.requires_grad = False
    train(model, optimizer, vectors(4))
    assert [own.layer for own in optimizer.health().layers] == ["2"]
    assert optimizer.health().problems == ()


def test_failed_decompositions_are_told_until_one_does_not_fail(monkeypatch: pytest.MonkeyPatch) -> None:
    def failing(matrix: Tensor) -> tuple[Tensor, Tensor]:
        raise FAILURE

    model = mlp()
    optimizer = TEKFAC(model, **EVERY_STEP)
    train(model, optimizer, vectors(1))
    with monkeypatch.context() as patch:
        patch.setattr(torch.linalg, "eigh", failing)
        train(model, optimizer, vectors(2))
    own = optimizer.health()["0"]
    assert (own.failed_refreshes, own.age_of_factors, own.age_of_basis) == (2, 0, 2)
    assert own.problem is not None
    assert own.problem.kind == "failed refreshes"
    assert "last 2 refreshes failed" in own.advice
    train(model, optimizer, vectors(1))
    assert optimizer.health()["0"].advice == ""


def test_no_gradient_and_a_bad_condition_are_told() -> None:
    model = mlp()
    optimizer = KFAC.natural(model, damping=1e-24)
    train(model, optimizer, vectors(1))
    kinds = {problem.kind for problem in optimizer.health().problems}
    assert kinds == {"ill-conditioned"}
    nothing = mlp()
    optimizer = TEKFAC(nothing)
    train(nothing, optimizer, vectors(1), lambda logits, y: 0 * logits.sum())
    assert {problem.kind for problem in optimizer.health().problems} == {"no gradient"}


# -- how far the basis is from the present moments -------------------------------------------------------


def dense_share(factor: Tensor, vectors_: Tensor) -> float:
    turned = vectors_.mT @ factor @ vectors_
    rest = turned - torch.diag_embed(turned.diagonal(dim1=-2, dim2=-1))
    return float((rest.norm(dim=(1, 2)) / turned.norm(dim=(1, 2))).max())


@pytest.mark.parametrize("method", METHODS)
def test_the_off_diagonal_share_is_that_of_the_dense_factors(method: type[NaturalGradient]) -> None:
    model = cnn()
    optimizer = method(model, lr=0.05, interval_growth=None, factors_every=1, basis_every=10)
    train(model, optimizer, images(1))
    assert all((own.off_diagonal or 0.0) < 1e-7 for own in optimizer.health(off_diagonals=True).layers)
    train(model, optimizer, images(4, seed=7))
    health = optimizer.health(off_diagonals=True)
    for name, curvature in statistics(optimizer).items():
        factors = optimizer._recipe.factors.read(curvature.moments.values)
        shares = (
            dense_share(factors.input, curvature.basis.vectors_in),
            dense_share(factors.output, curvature.basis.vectors_out),
        )
        found = health[name].off_diagonal
        assert found is not None
        assert found > 1e-3
        assert_close(found, max(shares), rtol=1e-6)


def test_it_is_computed_only_where_it_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    model = mlp()
    optimizer = TEKFAC(model, **EVERY_STEP)
    train(model, optimizer, vectors(1))
    monkeypatch.setattr("tekfac.optim.natural_gradient.off_diagonal", lambda *_: pytest.fail("computed"))
    assert all(own.off_diagonal is None for own in optimizer.health().layers)


def test_an_old_basis_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    model = mlp()
    optimizer = TEKFAC(model)
    train(model, optimizer, vectors(1))
    monkeypatch.setattr("tekfac.optim.natural_gradient.off_diagonal", lambda *_: 0.7)
    problem, _ = optimizer.health(off_diagonals=True).problems
    assert problem.kind == "old basis"
    assert "basis_every" in problem.advice


# -- asking, saving, printing ----------------------------------------------------------------------------


def test_asking_changes_nothing() -> None:
    ends = []
    for asks in (False, True):
        model = mlp()
        optimizer = TEKFAC(model, lr=0.05)
        for batch in vectors(4):
            train(model, optimizer, [batch])
            if asks:
                str(optimizer.health(off_diagonals=True))
        ends.append(everything(model, optimizer))
    assert_identical(*ends)


def test_ages_and_counts_are_saved() -> None:
    model = mlp()
    optimizer = TEKFAC(model, interval_growth=None, factors_every=2, basis_every=4)
    train(model, optimizer, vectors(4))
    model.eval()
    train(model, optimizer, vectors(2))
    other = TEKFAC(mlp(), interval_growth=None, factors_every=2, basis_every=4)
    other.load_state_dict(through_a_file(optimizer.state_dict()))
    assert other.health().layers == optimizer.health().layers
    assert other.health()["0"].empty_refreshes == 1


def test_a_state_without_them_is_loaded_and_what_is_not_known_is_none() -> None:
    model = mlp()
    optimizer = TEKFAC(model, **EVERY_STEP)
    train(model, optimizer, vectors(2))
    state = optimizer.state_dict()
    del saved_whole(state)["refreshes"]
    other = TEKFAC(mlp(), **EVERY_STEP)
    other.load_state_dict(state)
    assert ages(other) == (None, None, None)
    assert other.health()["0"].condition == optimizer.health()["0"].condition
    assert other.health().problems == ()


@pytest.mark.parametrize(
    ("damage", "told"),
    [
        ({"0": [1, 2, 3]}, r"\['refreshes'\]\['0'\] is"),
        ({"0": [1, -2, None, 0, 0, 0]}, r"\['refreshes'\]\['0'\].basis is -2"),
        ({"0": [1, 2, None, None, 0, 0]}, r"\['refreshes'\]\['0'\].empty is None"),
        ([], r"\['refreshes'\] is \[\]"),
    ],
)
def test_damaged_counts_are_refused(damage: Any, told: str) -> None:
    state = TEKFAC(mlp()).state_dict()
    saved_whole(state)["refreshes"] = damage
    with pytest.raises(ValueError, match=told):
        TEKFAC(mlp()).load_state_dict(state)


def test_a_skipped_step_is_no_refresh() -> None:
    model = mlp()
    optimizer = TEKFAC(model, **EVERY_STEP)
    train(model, optimizer, vectors(2))
    before = optimizer.health().layers
    train(model, optimizer, vectors(1), lambda logits, y: logits.sum() * math.nan)
    assert optimizer.skipped_steps == 1
    assert optimizer.health().layers == before


def test_it_prints_as_a_table_with_what_to_change_below() -> None:
    model = mlp()
    optimizer = TEKFAC(model, **EVERY_STEP)
    train(model, optimizer, vectors(1))
    model.eval()
    train(model, optimizer, vectors(3))
    first, header, *rows = str(optimizer.health()).splitlines()
    assert first == "TEKFAC: 4 steps, 0 skipped. Ages in steps."
    assert header.split()[:6] == ["layer", "factors", "basis", "Theta", "empty", "failed"]
    assert rows[0].split()[:6] == ["0", "3", "0", "-", "3", "0"]
    assert rows[0].endswith("no statistics")
    assert rows[2].startswith("0: its last 3 due refreshes brought no statistics: the model was called in eval")
    with pytest.raises(KeyError, match=r"No preconditioned layer 'head'. There are \['0', '2'\]"):
        optimizer.health()["head"]


# -- the lab ---------------------------------------------------------------------------------------------

TINY = ["--model", "mlp", "--model-option", "width=8", "--train-samples", "128", "--test-samples", "50"]
ARGUMENTS = ["train", *TINY, "--epochs", "3", "--batch-size", "64", "--out", "r", "--quiet"]


def test_tekfac_train_shows_once_what_is_off(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    refreshed = NetworkCurvature.refreshed
    monkeypatch.chdir(tmp_path)

    def without_batches(self: NetworkCurvature, batches: Any, due: Any) -> Any:
        return refreshed(self, {} if self.blocks else batches, due)

    monkeypatch.setattr(NetworkCurvature, "refreshed", without_batches)
    assert main([*ARGUMENTS, "--option", "first_interval=1"]) == 0
    shown = " ".join(capsys.readouterr().err.split())
    assert shown.count("due refreshes brought no statistics") == 1
    log = (tmp_path / "r" / "messages.log").read_text()
    assert log.count("due refreshes brought no statistics") == 1
    rows = RunFolder(tmp_path / "r").layers()
    assert [row.empty_refreshes for row in rows if row.layer == rows[0].layer] == [1, 3, 5]


def test_tekfac_train_says_nothing_of_a_run_that_is_well(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main([*ARGUMENTS, "--tensorboard"]) == 0
    assert "Epoch" not in capsys.readouterr().err
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(tmp_path / "r" / "tensorboard"))
    events.Reload()
    rows = RunFolder(tmp_path / "r").layers()
    for name in ("age_of_factors", "age_of_basis", "empty_refreshes", "failed_refreshes"):
        read = [event.value for event in events.Scalars(f"{name}/{rows[0].layer}")]
        assert read == [getattr(row, name) for row in rows if row.layer == rows[0].layer]


def test_lines_of_logs_from_before_are_read() -> None:
    line = LayerEpoch(1, 2, "0", 1.0, 0.1, 10.0, 0, 0, 1.0, 0.0, 3.0)
    plain = line.plain()
    assert LayerEpoch.from_plain(plain) == line
    for name in ("age_of_factors", "age_of_basis", "empty_refreshes"):
        del plain[name]
    old = LayerEpoch.from_plain(plain)
    assert math.isnan(old.age_of_factors)
    assert replace(old, age_of_factors=1.0, age_of_basis=0.0, empty_refreshes=3.0) == line
