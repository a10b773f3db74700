"""The config of a run: typed, checked, to a file and back."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tekfac.lab import recipes
from tekfac.lab.config import RunConfig
from tekfac.lab.grids import Range, Search, Sweep, applied, described, product, values_in
from tekfac.lab.optimizers import COMPARED, NATURAL
from tekfac.lab.run_folder import read_plain


def test_a_config_survives_the_way_through_a_file(tmp_path: Path) -> None:
    config = RunConfig(
        optimizer="sgdm", lr=0.1, options={"nesterov": True}, model_options={"width": 8}, augment=False
    )
    path = tmp_path / "config.json"
    path.write_text(json.dumps(config.plain()))
    assert RunConfig.from_plain(read_plain(path)) == config


def test_a_toml_file_and_a_run_file_are_read_alike(tmp_path: Path) -> None:
    toml, run = tmp_path / "my.toml", tmp_path / "run.json"
    toml.write_text('optimizer = "adam"\nlr = 0.01\n[options]\neps = 1e-6\n')
    run.write_text(
        json.dumps({"format": 1, "config": {"optimizer": "adam", "lr": 0.01, "options": {"eps": 1e-6}}})
    )
    assert read_plain(toml) == read_plain(run) == read_plain(tmp_path)


@pytest.mark.parametrize(
    ("plain", "told"),
    [
        ({"learning_rate": 0.1}, "unknown key 'learning_rate'"),
        ({"epoch": 3}, "Did you mean 'epochs'?"),
        ({"epochs": 0}, "Invalid epochs: 0"),
        ({"epochs": 2.5}, "Invalid epochs: 2.5. Expected a whole number"),
        ({"epochs": True}, "Invalid epochs: True"),
        ({"lr": -1.0}, "Invalid lr: -1.0"),
        ({"lr": "fast"}, "Invalid lr: 'fast'. Expected a number"),
        ({"lr": float("nan")}, "Invalid lr: nan"),
        ({"data": 3}, "Invalid data: 3. Expected a text"),
        ({"augment": 1}, "Invalid augment: 1. Expected true or false"),
        ({"options": [1]}, "Invalid options: [1]. Expected keys and values"),
        ({"schedule": "linear"}, "Unknown schedule: 'linear'"),
        ({"train_samples": 0}, "Invalid train_samples: 0"),
        ({"held_back": -1}, "Invalid held_back: -1"),
        ({"decay_factor": 2.0}, "Invalid decay_factor: 2.0"),
        ({"threads": 100_000}, "Invalid threads: 100000. Expected at most 1024"),
        ({"workers": 100_000}, "Invalid workers: 100000. Expected at most 1024"),
        ({"image_size": 100_000}, "Invalid image_size: 100000. Expected at most 4096"),
        ({"lr": 10**400}, "Expected a positive number"),
        ({"weight_decay": 10**400}, "Expected a finite number"),
    ],
)
def test_what_does_not_fit_is_named(plain: dict[str, Any], told: str) -> None:
    with pytest.raises(ValueError, match=re.escape(told)):
        RunConfig.from_plain(plain)


@pytest.mark.parametrize(
    ("name", "content", "told"),
    [
        ("none.toml", None, "There is no file"),
        ("none.json", None, "There is no file"),
        ("bad.toml", "lr = ", "as TOML"),
        ("bad.json", "{", "as JSON"),
        ("list.json", "[1]", "holds a list"),
    ],
)
def test_a_file_that_cannot_be_read_is_named(tmp_path: Path, name: str, content: str | None, told: str) -> None:
    path = tmp_path / name
    if content is not None:
        path.write_text(content)
    with pytest.raises(ValueError, match=told) as caught:
        read_plain(path)
    assert name in str(caught.value)


def test_the_fingerprint_tells_what_is_computed_but_not_where() -> None:
    config = RunConfig()
    assert (
        replace(config, name="x", data_dir="/d", device="cpu", threads=1, workers=3).fingerprint()
        == config.fingerprint()
    )
    for change in ({"seed": 1}, {"lr": 0.1}, {"options": {"kl_clip": 1e-3}}, {"model_options": {"width": 4}}):
        assert replace(config, **change).fingerprint() != config.fingerprint()  # type: ignore[arg-type]


def test_differences_are_told_but_not_those_of_the_place() -> None:
    config = RunConfig()
    assert config.differences(replace(config, lr=0.5, device="cpu")) == ["lr 0.001 -> 0.5"]


# -- grids ---------------------------------------------------------------------------------------------------


def test_a_grid_is_every_combination_and_several_grids_are_put_together() -> None:
    plan = Sweep.from_plain(
        {
            "base": {"model": "mlp"},
            "seeds": [3, 4],
            "grid": [
                {"optimizer": "sgdm", "lr": [0.1, 0.3]},
                {"optimizer": ["kfac", "tekfac"], "lr": 0.03, "options.kl_clip": [1e-3, 1e-2]},
            ],
        },
        "here",
    )
    assert len(plan.points) == 2 + 4
    assert values_in(plan.points)["options.kl_clip"] == [1e-3, 1e-2]
    assert [(c.seed, c.model, c.optimizer, c.lr, c.options) for c in plan.configs(plan.points[-1])] == [
        (3, "mlp", "tekfac", 0.03, {"kl_clip": 1e-2}),
        (4, "mlp", "tekfac", 0.03, {"kl_clip": 1e-2}),
    ]


def test_a_point_reaches_into_the_options_and_none_is_a_value_like_others() -> None:
    plain = RunConfig(options={"kl_clip": 1e-3, "damping": 0.1}).plain()
    new = applied(plain, {"options.kl_clip": None, "options.damping": 0.2, "epochs": 3})
    assert (new["options"], new["epochs"]) == ({"kl_clip": None, "damping": 0.2}, 3)
    assert plain["options"] == {"kl_clip": 1e-3, "damping": 0.1}


def test_a_point_is_described_shortly() -> None:
    assert (
        described({"optimizer": "tekfac", "lr": 0.03, "options.kl_clip": 1e-3})
        == "tekfac, lr 0.03, kl_clip 0.001"
    )


@pytest.mark.parametrize(
    ("plain", "told"),
    [
        ({}, "either grids"),
        ({"grid": {"lr": [0.1]}, "search": {"space": {"lr": [0.1]}, "trials": 1}}, "either grids"),
        ({"grids": []}, "Did you mean 'grid'?"),
        ({"base": {"lrr": 1}, "grid": {"lr": [0.1]}}, "Did you mean 'lr'?"),
        ({"grid": {"optimiser": ["sgdm"]}}, "Did you mean 'optimizer'?"),
        ({"grid": {"lr": []}}, "no values for 'lr'"),
        ({"grid": [1]}, "Invalid [[grid]] in here: 1. Expected keys and values"),
        ({"base": 3, "grid": {"lr": [0.1]}}, "Invalid [base] in here: 3"),
        ({"seeds": 3, "grid": {"lr": [0.1]}}, "Invalid seeds in here: 3. Expected a list of whole numbers"),
        ({"seeds": [], "grid": {"lr": [0.1]}}, "Invalid seeds"),
        ({"search": 3}, "Invalid [search] in here: 3"),
        ({"search": {"space": {"lr": 3}, "trials": 1}}, "Invalid choices for 'lr': 3. Expected a list"),
        ({"search": {"space": {"lr": {"lo": 1}}, "trials": 1}}, "unknown key 'lo'. Did you mean 'low'?"),
        ({"search": {"space": {"lr": {"low": 1}}, "trials": 1}}, "Invalid choices for 'lr'"),
        ({"search": {"space": {"lr": {"low": "a", "high": 1}}, "trials": 1}}, "Invalid range: 'a' to 1"),
        ({"search": {"space": {"lr": [0.1]}, "trials": "x"}}, "Invalid trials in here: 'x'"),
        ({"search": {"space": {"lr": [0.1]}, "trials": 1, "sampler": "tpee"}}, "Did you mean 'tpe'?"),
        ({"search": {"space": {"lr": [0.1]}, "trials": 0}}, "Invalid search"),
        ({"search": {"space": {"lr": [0.1]}, "trials": 1, "sampler": "magic"}}, "Unknown sampler: 'magic'"),
        ({"search": {"spaces": {}}}, "Did you mean 'space'?"),
        ({"search": {"space": {"lr": {"low": 1.0, "high": 0.1}}, "trials": 1}}, "Invalid range"),
    ],
)
def test_a_plan_that_makes_no_sense_is_refused(plain: dict[str, Any], told: str) -> None:
    with pytest.raises(ValueError, match=re.escape(told)):
        Sweep.from_plain(plain, "here")


def test_a_search_is_read() -> None:
    plain = {
        "search": {
            "space": {"lr": {"low": 1e-3, "high": 1.0}, "optimizer": ["sgdm"]},
            "trials": 5,
            "sampler": "random",
        }
    }
    assert Sweep.from_plain(plain, "here").search == Search(
        {"lr": Range(1e-3, 1.0), "optimizer": ("sgdm",)}, 5, "random"
    )


def test_a_value_that_is_no_list_stands_for_itself() -> None:
    assert product({"a": 1, "b": [2, 3]}) == [{"a": 1, "b": 2}, {"a": 1, "b": 3}]


# -- recipes -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("data", "epochs", "decay"), [("cifar10", 100, 40), ("cifar100", 100, 40), ("svhn", 40, 20)]
)
def test_the_task_of_the_paper_has_its_settings(data: str, epochs: int, decay: int) -> None:
    task = recipes.paper_task(data, "resnet20")
    assert (task.batch_size, task.epochs, task.schedule, task.decay_every, task.decay_factor) == (
        128,
        epochs,
        "step",
        decay,
        0.1,
    )
    assert (task.train_samples, task.image_size, task.augment, dict(task.model_options)) == (
        None,
        None,
        None,
        {},
    )


@pytest.mark.parametrize(("data", "shares"), [("cifar10", (0.4, 0.8)), ("svhn", (0.5,))])
def test_the_small_task_decays_after_the_same_shares_of_the_run(data: str, shares: tuple[float, ...]) -> None:
    task = recipes.small_task(data, "vgg16")
    falls = [epoch / task.epochs for epoch in range(1, task.epochs) if epoch % task.decay_every == 0]
    assert tuple(falls) == shares


def test_the_grid_of_the_paper_is_its_lists_of_settings() -> None:
    counts = {name: len(recipes.paper_grid(name)) for name in COMPARED}
    assert counts == {"sgdm": 10, "adam": 10, "kfac": 100, "ekfac": 100, "tkfac": 70, "tekfac": 70}
    every_lr = {point["lr"] for point in recipes.paper_grid("tekfac")}
    assert every_lr == {1e-4, 3e-4, 1e-3, 3e-3, 1e-2, 3e-2, 1e-1, 3e-1, 1.0, 3.0}


def test_the_small_grid_gives_every_optimizer_as_many_points() -> None:
    assert {len(recipes.small_grid(name)) for name in COMPARED} == {5}


@pytest.mark.parametrize("name", COMPARED)
@pytest.mark.parametrize("points", [recipes.paper_grid, recipes.small_grid, lambda name: [recipes.start(name)]])
def test_every_point_makes_an_optimizer(name: str, points: Any) -> None:
    from tekfac.lab import models, optimizers

    model = models.build("mlp", channels=1, classes=10, size=8)
    for point in points(name)[:3]:
        config = recipes.config(recipes.digits(), point)
        made = optimizers.build(config, model)
        assert made.param_groups[0]["lr"] == point["lr"]


def test_the_methods_of_the_table_are_the_natural_ones() -> None:
    assert list(NATURAL) == ["kfac", "ekfac", "tkfac", "tekfac"]


@pytest.mark.parametrize("name", NATURAL)
def test_the_lab_has_the_presets_as_they_are(name: str) -> None:
    """Also what they leave out on purpose: None is not always the default."""
    from tekfac.lab import models, optimizers

    model = models.build("mlp", channels=1, classes=10, size=8)
    presets = {
        "paper": recipes.in_the_paper(name),
        "natural": {"optimizer": name, **recipes.naturally(name, 50)},
    }
    for preset, point in presets.items():
        made: Any = optimizers.build(recipes.config(recipes.digits(), point), model)
        expected = getattr(NATURAL[name], preset)(model, seed=0)
        assert made._settings == replace(expected._settings, seed=made._settings.seed)
        group, wanted = made.param_groups[0], expected.param_groups[0]
        assert all(group[key] == wanted[key] for key in ("lr", "momentum", "weight_decay", "damping"))


def test_toml_has_a_word_for_none(tmp_path: Path) -> None:
    path = tmp_path / "run.toml"
    path.write_text('optimizer = "tekfac"\n[options]\ninterval_growth = "None"\ngrid = [["None", 1]]\n')
    plain = read_plain(path)
    assert plain == {"optimizer": "tekfac", "options": {"interval_growth": None, "grid": [[None, 1]]}}
