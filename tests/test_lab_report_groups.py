"""Promise: seeds make a group, what can be compared makes a task, and labels tell them apart."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from lab_runs import METHODS, write_run
from tekfac.lab.report.runs import Task, find_runs, plain, tasks_of
from tekfac.methods import ALL


def tasks(folder: Path, *changes: dict[str, Any]) -> list[Task]:
    for index, change in enumerate(changes):
        write_run(folder / f"{index:03}", [0.5], **change)
    return tasks_of(find_runs([folder]))


def test_seeds_and_places_make_no_groups(tmp_path: Path) -> None:
    (task,) = tasks(
        tmp_path,
        {"seed": 2},
        {"seed": 0, "device": "cuda", "threads": 4},
        {"seed": 1, "data_dir": "/elsewhere", "workers": 2},
    )
    (group,) = task.groups
    assert (group.label, group.seeds, group.status) == ("SGDM", [0, 1, 2], "3")


def test_optimizers_stand_in_their_order_under_their_names(tmp_path: Path) -> None:
    mixed = ["zeta", *reversed(METHODS), "adamw", "lion", "adam", "sgd", "sgdm"]
    (task,) = tasks(tmp_path, *({"optimizer": optimizer} for optimizer in mixed))
    names = ["SGD", "SGDM", "Adam", "AdamW", *(method.name for method in ALL), "lion", "zeta"]
    assert [group.label for group in task.groups] == names


def test_the_settings_that_differ_are_in_the_label_and_sort_the_groups(tmp_path: Path) -> None:
    (task,) = tasks(
        tmp_path,
        {"lr": 0.1, "options": {"kl_clip": 0.001, "damping": 0.5}},
        {"lr": 0.003, "options": {"kl_clip": 0.001, "damping": 0.5}},
        {"lr": 0.1, "options": {"damping": 0.5}},
        {"optimizer": "adam", "lr": 0.7},
    )
    assert [group.label for group in task.groups] == [
        "SGDM, lr 0.003, kl_clip 0.001",
        "SGDM, lr 0.1",
        "SGDM, lr 0.1, kl_clip 0.001",
        "Adam",
    ]


def test_a_name_makes_a_group_and_is_its_label(tmp_path: Path) -> None:
    (task,) = tasks(tmp_path, {"name": "tuned"}, {"name": ""}, {"name": "tuned", "seed": 1})
    assert [(group.label, len(group.runs)) for group in task.groups] == [("SGDM", 1), ("SGDM, tuned", 2)]


def test_data_model_and_whatever_else_differs_make_tasks(tmp_path: Path) -> None:
    found = tasks(
        tmp_path,
        {"model": "resnet20"},
        {"epochs": 20},
        {"epochs": 100, "model_options": {"width": 4}},
        {"epochs": 20, "seed": 1},
        {"data": "cifar10", "a_key_to_come": "x"},
    )
    assert [task.title for task in found] == [
        "cifar10, cnn",
        "digits, cnn, epochs 20",
        "digits, cnn, epochs 100, width 4",
        "digits, resnet20",
    ]
    assert [len(task.groups[0].runs) for task in found] == [1, 2, 1, 1]


def test_runs_equal_in_settings_and_seed_are_one_observation(tmp_path: Path) -> None:
    (task,) = tasks(
        tmp_path,
        {"seed": 0, "status": None},
        {"seed": 1},
        {"seed": 0},
        {"seed": 0, "threads": 2, "data_dir": "elsewhere"},
        {"seed": 0, "lr": 0.2},
    )
    first, other = task.groups
    assert (first.seeds, first.status, other.seeds) == ([0, 1], "2", [0])
    assert [run.path.name for run in first.runs] == ["002", "001"]  # one that has ended goes before others
    assert [run.path.name for run in first.repeated] == ["003", "000"]


def test_runs_that_did_not_finish_are_counted(tmp_path: Path) -> None:
    ends = ["diverged", "diverged", None, "finished"]
    (task,) = tasks(tmp_path, *({"seed": seed, "status": status} for seed, status in enumerate(ends)))
    assert task.groups[0].status == "2 of 4 diverged, 1 of 4 unfinished"


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0.1, "0.1"),
        (1e-7, "1e-07"),
        (0.123456789, "0.123456789"),
        (3, "3"),
        (None, "none"),
        (True, "yes"),
        ([0.9, 0.999], "(0.9, 0.999)"),
        ("step", "step"),
    ],
)
def test_settings_are_short_but_exact(value: Any, text: str) -> None:
    assert plain(value) == text
