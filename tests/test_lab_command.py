"""The lab on the command line: what a user types, what comes out, and what bad input is answered with."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tekfac.cli import run_arguments
from tekfac.cli.main import main, parser_of
from tekfac.lab import pool, recipes, sweeping
from tekfac.lab.config import RunConfig
from tekfac.lab.run_folder import RunFolder
from tekfac.lab.training import train

TINY = ["--model", "mlp", "--model-option", "width=8", "--train-samples", "128", "--test-samples", "50"]


@pytest.fixture(autouse=True)
def _here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Everything is written below the test's own folder; the data folder of the machine is not looked at."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("TEKFAC_DATA", str(tmp_path / "data"))


@pytest.fixture
def in_process(monkeypatch: pytest.MonkeyPatch) -> list[RunConfig]:
    """Jobs are run here and now instead of in other processes; what was run is noted."""
    run: list[RunConfig] = []

    class Future:
        def __init__(self, job: pool.Job, manner: pool.Manner) -> None:
            self._error: Exception | None = None
            try:
                self._results = [
                    train(config, folder, resume=True, command=manner.command)
                    for config, folder in zip(job.configs, job.folders, strict=True)
                ]
            except ValueError as error:
                self._error = error
            run.extend(job.configs)

        def exception(self) -> Exception | None:
            return self._error

        def result(self) -> list[dict[str, Any]]:
            return self._results

    class Pool:
        free = 1

        def __init__(self, manner: pool.Manner) -> None:
            self._manner = manner

        def __enter__(self) -> Pool:
            return self

        def __exit__(self, *error: object) -> None:
            pass

        def submit(self, job: pool.Job) -> Future:
            return Future(job, self._manner)

        def wait(self, futures: Any, seconds: float | None = None) -> set[Any]:
            return set(futures)

        def overall(self, description: str, total: int) -> Any:
            return lambda done: None

    monkeypatch.setattr(pool, "Pool", Pool)
    monkeypatch.setattr(sweeping, "Pool", Pool)
    return run


@pytest.fixture
def no_figures(monkeypatch: pytest.MonkeyPatch) -> None:
    """Reports have their numbers only: to draw takes longer than to train."""
    monkeypatch.setattr("tekfac.lab.report.writing._drawings", lambda summary: [])


def config_in(folder: str) -> RunConfig:
    return RunConfig.from_plain(json.loads((Path(folder) / "run.json").read_text())["config"])


# -- train ---------------------------------------------------------------------------------------------------


def test_a_run_takes_its_settings_from_the_arguments(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = [
        "--optimizer",
        "tekfac",
        "--lr",
        "0.02",
        "--kl-clip",
        "1e-2",
        "--option",
        "beta='scale'",
        "--option",
        "momentum_at=after",
        "--epochs",
        "2",
    ]
    assert main(["train", *TINY, *arguments, "--seed", "5", "--out", "r", "--quiet"]) == 0
    config = config_in("r")
    assert (config.optimizer, config.lr, config.epochs, config.seed) == ("tekfac", 0.02, 2, 5)
    assert (config.options["kl_clip"], config.options["beta"]) == (1e-2, "scale")
    assert (config.model, dict(config.model_options), config.schedule) == ("mlp", {"width": 8}, "cosine")
    assert "after 2 epochs" in capsys.readouterr().out


def test_arguments_go_before_the_file() -> None:
    Path("my.toml").write_text('model = "mlp"\noptimizer = "adam"\nlr = 0.5\nepochs = 1\ntrain_samples = 64\n')
    assert main(["train", "--config", "my.toml", "--lr", "0.01", "--out", "r"]) == 0
    config = config_in("r")
    assert (config.optimizer, config.lr, config.train_samples) == ("adam", 0.01, 64)
    assert main(["train", "--config", "r/run.json", "--out", "again"]) == 0
    assert config_in("again") == config


def test_fewer_epochs_keep_the_shares_of_the_schedule(in_process: list[RunConfig]) -> None:
    options = parser_of("compare").parse_args(["--data", "cifar10", "--recipe", "paper", "--epochs", "10"])
    assert (run_arguments.task(options).epochs, run_arguments.task(options).decay_every) == (10, 4)


# -- compare and sweep ---------------------------------------------------------------------------------------


def test_a_comparison_is_a_table_and_a_page(
    in_process: list[RunConfig], capsys: pytest.CaptureFixture[str]
) -> None:
    asked = ["--optimizers", "sgdm,ekfac", "--lr", "sgdm:0.5", "--option", "ekfac:damping=0.1", "--seeds", "2"]
    assert main(["compare", *TINY, *asked, "--epochs", "2", "--out", "c", "--quiet"]) == 0
    assert [(c.optimizer, c.seed) for c in in_process] == [("sgdm", 0), ("ekfac", 0), ("sgdm", 1), ("ekfac", 1)]
    assert (in_process[0].lr, in_process[1].options["damping"]) == (0.5, 0.1)
    out = capsys.readouterr().out
    assert "SGDM" in out
    assert "c/report.html" in out
    written = {path.name for path in Path("c").iterdir()}
    assert written >= {"report.html", "report.md", "tables.tex", "summary.csv", "figures", "runs"}
    told = Path("c/report.md").read_text()
    assert "SGDM: lr 0.5" in told
    assert "tekfac compare" in told
    assert "seeds: 0, 1" in told


def test_the_default_is_digits_six_optimizers_and_three_seeds() -> None:
    options = parser_of("compare").parse_args([])
    assert run_arguments.task(options) == recipes.digits()
    assert run_arguments.optimizers(options) == ["sgdm", "adam", "kfac", "ekfac", "tkfac", "tekfac"]
    assert run_arguments.seeds(options) == [0, 1, 2]


@pytest.mark.usefixtures("no_figures")
def test_a_sweep_is_followed_by_a_comparison_of_its_best(
    in_process: list[RunConfig], capsys: pytest.CaptureFixture[str]
) -> None:
    sweep = ["sweep", "--grid", "small", "--optimizers", "sgdm,tkfac", "--held-back", "100", "--epochs", "1"]
    assert main([*sweep, *TINY[:-2], "--out", "s", "--quiet"]) == 0
    assert len(in_process) == 10
    assert {c.held_back for c in in_process} == {100}
    told = capsys.readouterr().out
    assert "10 settings" in told
    assert told.count("factors_every") == 1
    trials = json.loads(Path("s/trials.json").read_text())
    best = {
        name: next(t["point"] for t in trials if t["point"]["optimizer"] == name) for name in ("sgdm", "tkfac")
    }
    in_process.clear()
    assert main(["compare", "--tuned", "s", "--seeds", "1", "--out", "c"]) == 0
    assert {c.optimizer: c.lr for c in in_process} == {name: point["lr"] for name, point in best.items()}
    assert {(c.held_back, c.train_samples, c.model) for c in in_process} == {(0, 128, "mlp")}
    assert "that did best in `tekfac sweep --grid small" in Path("c/report.md").read_text()


# -- reproduce -----------------------------------------------------------------------------------------------


@pytest.fixture
def tiny_tasks(monkeypatch: pytest.MonkeyPatch) -> None:
    """The paper's experiments on digits with a tiny network, which keep the names of the paper's."""
    from tekfac.lab import inputs
    from tekfac.lab.data.loading import load

    def task(data: str, model: str, scale: str) -> RunConfig:
        return RunConfig(
            data=data,
            model=model,
            model_options={"width": 2},
            train_samples=64,
            test_samples=40,
            epochs=2,
            batch_size=32,
        )

    monkeypatch.setattr(recipes, "task", task)
    monkeypatch.setattr(inputs, "load", lambda name, folder, **settings: load("digits"))
    monkeypatch.setattr(recipes, "held_back", lambda data: 40)


@pytest.mark.usefixtures("no_figures", "tiny_tasks")
def test_the_table_of_accuracies_has_the_papers_numbers_beside(in_process: list[RunConfig]) -> None:
    asked = ["--data", "cifar10,svhn", "--models", "vgg16", "--optimizers", "sgdm,tekfac", "--seeds", "1"]
    assert main(["reproduce", "table-accuracy", *asked, "--out", "p"]) == 0
    tuning = [c for c in in_process if c.held_back]
    final = [c for c in in_process if not c.held_back]
    assert (len(tuning), len(final)) == (2 * 2 * 5, 4)
    assert {c.epochs for c in tuning} == {1}
    told = Path("p/small/table-accuracy/report.md").read_text()
    assert "93.35 ± 0.17" in told
    assert "94.98 ± 0.09" in told
    assert "Ours in small" in told
    assert (Path("p/small/table-accuracy") / "report.html").exists()


@pytest.mark.usefixtures("no_figures", "tiny_tasks")
def test_untuned_runs_have_the_settings_of_the_paper(in_process: list[RunConfig]) -> None:
    asked = ["--data", "cifar100", "--models", "vgg16", "--optimizers", "tekfac", "--seeds", "1", "--no-tune"]
    assert main(["reproduce", "figure-curves", *asked, "--out", "p"]) == 0
    [config] = in_process
    assert (config.lr, config.options["trace_floor"], config.options["factors_every"]) == (1e-3, 1e-2, 50)


@pytest.mark.parametrize(
    ("name", "runs", "printed"),
    [
        pytest.param("table-vartheta", 7, "74.74 ± 0.11", marks=pytest.mark.slow),
        ("table-lr", 4, "72.47 ± 0.23"),
    ],
)
@pytest.mark.usefixtures("no_figures", "tiny_tasks")
def test_the_tables_of_sensitivity_have_a_row_of_ours_and_one_of_the_paper(
    name: str, runs: int, printed: str, in_process: list[RunConfig]
) -> None:
    assert main(["reproduce", name, "--seeds", "2", "--out", "p"]) == 0
    assert len(in_process) == 2 * runs
    told = Path(f"p/small/{name}/report.md").read_text()
    assert "| ours |" in told
    assert printed in told


@pytest.mark.slow
def test_the_figure_of_sensitivity_is_over_both_settings(in_process: list[RunConfig], tiny_tasks: None) -> None:
    assert main(["reproduce", "figure-sensitivity", "--out", "p"]) == 0
    assert len({(c.lr, c.options["trace_floor"]) for c in in_process}) == 28
    assert list(Path("p/small/figure-sensitivity/figures").glob("*trace-floor*.pdf"))


# -- bad input -----------------------------------------------------------------------------------------------

NETS = """
import sys
from torch import nn
def err(): raise KeyError("boom")
def ends(): sys.exit(0)
def wrong(): return nn.Sequential(nn.Flatten(), nn.Linear(64, 3))
def narrow(): return nn.Sequential(nn.Flatten(), nn.Linear(63, 10))
def empty(): return nn.Flatten()
"""


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["train", "--data", "cifar11"], "Did you mean 'cifar10'?"),
        (["train", "--data", "cifar10"], "does not exist"),
        (["train", "--data", "cifar10", "--data-dir", "nowhere"], "'nowhere' does not exist"),
        (["train", "--model", "resnet21"], "Did you mean 'resnet20'?"),
        (["train", "--optimizer", "tekfak"], "Did you mean 'tekfac'?"),
        (["train", "--option", "dampin=3"], "Did you mean 'damping'?"),
        (["train", "--option", "damping"], "Expected KEY=VALUE"),
        (["train", "--lr", "-1"], "Invalid lr: -1.0"),
        (["train", "--device", "abacus"], "Cannot use device 'abacus'"),
        (["train", "--train-samples", "99999"], "There are 1437 images"),
        (["train", "--config", "none.toml"], "There is no file 'none.toml'"),
        (["train", "--resume", "nowhere"], "holds no run"),
        (["train", "--recipe", "paper"], "for cifar10, cifar100 and svhn"),
        (["compare", "--optimizers", "sgdm,addam"], "Did you mean 'adam'?"),
        (["compare", "--optimizers", "sgdm,sgdm"], "Expected different names"),
        (["compare", "--seeds", "many"], "Invalid --seeds: 'many'"),
        (["compare", "--lr", "adamw:1", "--optimizers", "sgdm"], "is not among --optimizers"),
        (["compare", "--jobs", "0"], "Invalid --jobs: 0"),
        (["compare", "--tuned", "nowhere"], "'nowhere' holds no finished sweep"),
        (["compare", "--lr", "sgdm:fast"], "Invalid --lr: 'fast'"),
        (["train", "--checkpoint-every", "nan"], "Invalid --checkpoint-every: nan"),
        (["train", "--seed", "99999999999999999999"], "Invalid seed"),
        (["train", "--optimizer", "sgdm", "--momentum", "1.5"], "Invalid momentum: 1.5"),
        (["train", "--model-option", "width=-3"], "Invalid width of the model: -3"),
        (["train", "--model", "nets.py:err"], "Model nets.py:err failed with KeyError: 'boom'"),
        (["train", "--model", "nets.py:ends"], "Model nets.py:ends failed with SystemExit"),
        (["train", "--model", "nets.py:wrong"], "Model nets.py:wrong returned [2, 3] for images"),
        (["train", "--model", "nets.py:narrow"], "Model nets.py:narrow failed on images of shape [2, 1, 8, 8]"),
        (["train", "--model", "nets.py:empty"], "Model nets.py:empty has no parameters"),
        (["train", "--model", "nets.py:wrnog"], "Did you mean 'wrong'?"),
        (["train", "--model", "broken.py:make"], "Cannot import 'broken.py' for model: ZeroDivisionError"),
        (["sweep"], "needs --grid paper, --grid small or --config FILE"),
        (["sweep", "--config", "none.toml"], "There is no file 'none.toml'"),
        (["reproduce", "table-acuracy"], "Did you mean 'table-accuracy'?"),
        (["reproduce", "table-lr"], "does not exist"),
        (["report", "nowhere"], "nowhere"),
        (["data", "fetch", "cifar12"], "Did you mean"),
        (["data", "check", "nowhere"], "nowhere"),
    ],
)
def test_bad_input_is_answered_in_a_line_or_two(
    arguments: list[str], told: str, capsys: pytest.CaptureFixture[str], in_process: list[RunConfig]
) -> None:
    Path("nets.py").write_text(NETS)
    Path("broken.py").write_text("1 / 0")
    assert main(arguments) == 1
    err = capsys.readouterr().err
    assert told in err
    assert err.startswith("tekfac: ")
    assert err.count("\n") == 1
    assert "Traceback" not in err


def test_with_debug_one_sees_where() -> None:
    with pytest.raises(ValueError, match="Did you mean"):
        main(["--debug", "train", "--data", "cifar11"])


def test_an_unknown_key_in_a_file_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    Path("my.toml").write_text("learning_rat = 0.1\n")
    assert main(["train", "--config", "my.toml"]) == 1
    assert "my.toml has an unknown key 'learning_rat'" in capsys.readouterr().err


def test_a_resume_with_another_config_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["train", *TINY, "--epochs", "1", "--out", "r"]) == 0
    before = Path("r/result.json").read_bytes()
    assert main(["train", "--resume", "r", "--lr", "0.5"]) == 1
    assert "another config (lr 0.003 -> 0.5)" in capsys.readouterr().err
    assert main(["train", *TINY, "--epochs", "1", "--out", "r"]) == 1
    assert "already holds this run" in capsys.readouterr().err
    assert Path("r/result.json").read_bytes() == before


COMMANDS = ["compare", "train", "sweep --grid small", "reproduce table-lr", "report .", "data list"]
WITHOUT_EXTRAS = """
import contextlib, io, json, sys
sys.modules.update(dict.fromkeys(["rich", "optuna", "matplotlib", "sklearn", "scipy"]))
from tekfac.cli.main import main
for command in sys.argv[1:]:
    with contextlib.redirect_stderr(io.StringIO()) as told:
        code = main(command.split())
    print(json.dumps([code, told.getvalue()]))
"""


@pytest.fixture(scope="module")
def answers(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[int, str]]:
    """What the commands answer in a process where nothing but torch can be imported."""
    done = subprocess.run(
        [sys.executable, "-c", WITHOUT_EXTRAS, *COMMANDS],
        cwd=tmp_path_factory.mktemp("bare"),
        capture_output=True,
        text=True,
        check=True,
    )
    return dict(zip(COMMANDS, map(json.loads, done.stdout.splitlines()), strict=True))


@pytest.mark.parametrize("command", COMMANDS)
def test_the_missing_extra_is_named(command: str, answers: dict[str, tuple[int, str]]) -> None:
    code, told = answers[command]
    assert code == 1
    assert "pip install 'tekfac[" in told
    assert told.count("\n") == 1, told


# -- what is asked for is done, or refused -------------------------------------------------------------------


@pytest.mark.usefixtures("no_figures")
def test_a_sweep_from_a_file_is_judged_on_held_back_images(
    in_process: list[RunConfig], capsys: pytest.CaptureFixture[str]
) -> None:
    base = 'model = "mlp"\nepochs = 1\ntrain_samples = 64\n'
    Path("my.toml").write_text(f"[base]\n{base}[grid]\nlr = [0.1, 0.2]\n")
    assert main(["sweep", "--config", "my.toml", "--out", "s"]) == 0
    assert {config.held_back for config in in_process} == {0.2}
    Path("test.toml").write_text(f"[base]\nheld_back = 0\n{base}[grid]\nlr = [0.1]\n")
    assert main(["sweep", "--config", "test.toml", "--out", "t"]) == 0
    assert in_process[-1].held_back == 0
    assert "judged on the test set" in capsys.readouterr().out
    assert main(["compare", "--tuned", "s", "--optimizers", "tekfac", "--seeds", "1", "--out", "c"]) == 0


@pytest.mark.usefixtures("no_figures")
@pytest.mark.parametrize("setting", ["momentum=0.5", "weight_decay=0.01"])
def test_a_setting_that_is_no_option_reaches_the_optimizer(setting: str, in_process: list[RunConfig]) -> None:
    asked = [
        "--optimizers",
        "sgdm",
        "--option",
        f"sgdm:{setting}",
        "--epochs",
        "1",
        "--seeds",
        "1",
        "--out",
        "c",
    ]
    assert main(["compare", *TINY, *asked]) == 0
    name, _, value = setting.partition("=")
    assert getattr(in_process[0], name) == float(value)
    assert name not in in_process[0].options


def test_an_argument_that_cannot_be_read_is_told_in_a_line(capsys: pytest.CaptureFixture[str]) -> None:
    for arguments, told in {
        ("compre",): "Did you mean 'compare'?",
        ("sweep", "--grid", "papr"): "Did you mean 'paper'?",
        ("compare", "--held-back", "many"): "'many' is neither a whole number nor a share below 1",
        ("compare", "--epochs", "x"): "invalid int value: 'x'",
    }.items():
        with pytest.raises(SystemExit) as ended:
            main(list(arguments))
        err = capsys.readouterr().err
        assert ended.value.code == 2
        assert told in err
        assert len(err.splitlines()) == 1


def test_the_name_of_an_optimizer_may_be_written_large() -> None:
    assert main(["train", "--optimizer", "TEKFAC", *TINY, "--epochs", "1", "--out", "r", "--quiet"]) == 0
    assert RunFolder(Path("r")).config().optimizer == "tekfac"


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["sweep", "--config", "my.toml", "--seeds", "3"], "--seeds has no place here"),
        (["sweep", "--config", "my.toml", "--optimizers", "adam"], "--optimizers has no place here"),
        (["compare", "--tuned", ".", "--recipe", "paper"], "--recipe has no place here"),
        (["train", "--resume", "r", "--out", "elsewhere"], "--out has no place here"),
        (["reproduce", "table-lr", "--optimizers", "adam"], "table-lr is of tekfac on cifar100 with resnet20"),
        (["train", "--resume", "r", "--config", "my.toml"], "--config has no place here"),
    ],
)
def test_an_argument_that_would_not_be_heeded_is_refused(
    arguments: list[str], told: str, capsys: pytest.CaptureFixture[str]
) -> None:
    Path("my.toml").write_text("[grid]\nlr = [0.1]\n")
    Path("trials.json").write_text("[]")
    assert main(arguments) == 1
    assert told in capsys.readouterr().err


def test_a_wrong_setting_of_the_last_optimizer_is_told_before_the_first_is_run(
    in_process: list[RunConfig], capsys: pytest.CaptureFixture[str]
) -> None:
    asked = ["--optimizers", "sgdm,tekfac", "--option", "tekfac:dampng=0.1", "--out", "c"]
    assert main(["compare", *TINY, *asked]) == 1
    assert "Did you mean 'damping'?" in capsys.readouterr().err
    assert in_process == []


@pytest.mark.slow
def test_the_runs_of_a_study_of_sensitivity_do_not_enter_the_table_of_accuracies(
    in_process: list[RunConfig], tiny_tasks: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise one optimizer would be shown with the best of many settings, chosen on the test set."""
    presented: dict[str, int] = {}
    monkeypatch.setattr(
        "tekfac.cli.reproduce.present",
        lambda folders, out, asked: presented.update({out.name: len(folders)}),
    )
    asked = ["--data", "cifar100", "--models", "resnet20", "--optimizers", "sgdm,tekfac", "--seeds", "1"]
    assert main(["reproduce", "all", *asked, "--out", "p"]) == 0
    assert presented == {"table-accuracy": 2, "table-vartheta": 7, "table-lr": 4, "figure-sensitivity": 28}
