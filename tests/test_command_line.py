"""Promise: the command line answers at once, shows its defaults, and knows what was meant."""

from __future__ import annotations

import argparse
import json
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import tekfac
from tekfac.cli.main import COMMANDS, main, parser_of
from tekfac.cli.parsing import has_default, pair
from tekfac.common.extras import EXTRAS_OF

ROOT = Path(__file__).resolve().parent.parent
HEAVY = ("torch", "numpy", *EXTRAS_OF)

NOTHING_UNLESS_GIVEN = {
    "compare": {"--tuned", "--model-option"},
    "train": {"--config", "--resume", "--model-option"},
    "sweep": {"--config", "--grid", "--model-option"},
    "reproduce": set(),
    "report": set(),
    "data": set(),
    "fisher": {"--state", "--model-option", "--channels", "--classes", "--size"},
    "bench": set(),
    "explain": {
        *("--model", "--first-order", "--model-option", "--channels", "--classes", "--size"),
        *("--link", "--flops", "--batch"),
    },
}
"""Options that take a value and have none by default."""


def in_a_process_of_its_own(code: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)


# -- at once -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("arguments", [["--help"], ["--version"], ["compre"], ["--optimizr"], []])
def test_what_needs_no_command_imports_nothing_heavy(arguments: list[str]) -> None:
    code = (
        "import json, sys\n"
        "from tekfac.cli.main import main\n"
        "try:\n"
        f"    main({arguments!r})\n"
        "finally:\n"
        "    print(json.dumps(sorted(sys.modules)), file=sys.stderr)\n"
    )
    *_, loaded = (line for line in in_a_process_of_its_own(code).stderr.splitlines() if line.startswith("["))
    assert "tekfac.cli.main" in json.loads(loaded)
    assert not {name.partition(".")[0] for name in json.loads(loaded)} & set(HEAVY)


def test_the_help_lists_all_commands(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["--help"])
    out = capsys.readouterr().out
    assert ended.value.code == 0
    for command, purpose in COMMANDS.items():
        assert command in out
        assert purpose in out


def test_every_module_that_adds_arguments_is_a_command() -> None:
    folder = Path(sys.modules[parser_of.__module__].__file__ or "").parent
    found = {path.stem for path in folder.glob("*.py") if "def add_arguments(" in path.read_text()}
    assert found == set(COMMANDS)


def test_every_command_can_be_asked_for_help_where_torch_alone_is_installed() -> None:
    code = (
        f"import sys; sys.modules.update(dict.fromkeys({('numpy', *EXTRAS_OF)!r}))\n"
        "from tekfac.cli.main import COMMANDS, parser_of\n"
        "print([parser_of(command).format_help().split()[2] for command in COMMANDS])"
    )
    done = in_a_process_of_its_own(code)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == str(list(COMMANDS))


# -- the package ---------------------------------------------------------------------------------------------


def test_names_of_the_package_are_imported_when_they_are_asked_for() -> None:
    code = (
        "import sys, tekfac\n"
        "assert 'torch' not in sys.modules\n"
        "assert set(tekfac.__all__) | {'methods', 'damping', 'likelihoods', 'layers'} <= set(dir(tekfac))\n"
        "assert 'torch' not in sys.modules\n"
        "assert tekfac.methods.TEKFAC.name == 'TEKFAC'\n"
        "assert tekfac.TEKFAC.__module__ == 'tekfac.optimizers' and 'TEKFAC' in vars(tekfac)\n"
        "assert 'tekfac.fisher' not in sys.modules\n"
        "from tekfac import *\n"
        "assert fisher is tekfac.fisher and callable(tekfac.fisher.estimate) and TEKFAC is tekfac.TEKFAC\n"
        "assert 'matplotlib' not in sys.modules\n"
    )
    done = in_a_process_of_its_own(code)
    assert done.returncode == 0, done.stderr


def test_a_name_that_the_package_does_not_have_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="module 'tekfac' has no attribute 'TEKFACT'"):
        tekfac.TEKFACT  # type: ignore[attr-defined]  # noqa: B018


# -- the help ------------------------------------------------------------------------------------------------


def parsers(parser: argparse.ArgumentParser) -> Iterator[argparse.ArgumentParser]:
    """A parser and those of its actions."""
    yield parser
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for inner in action.choices.values():
                yield from parsers(inner)


@pytest.mark.parametrize("command", COMMANDS)
def test_every_option_is_explained_and_shows_its_default(command: str) -> None:
    for parser in parsers(parser_of(command)):
        formatter = parser._get_formatter()
        for action in (action for action in parser._actions if action.option_strings):
            name, text = action.option_strings[-1], formatter._expand_help(action)
            assert text, name
            if action.nargs != 0 and name not in NOTHING_UNLESS_GIVEN[command]:
                assert "(default: " in text, name
            if has_default(action) and not isinstance(action.default, list):
                shown = f"{action.default:g}" if isinstance(action.default, float) else str(action.default)
                assert f"(default: {shown})" in text, name


def shown_commands() -> list[str]:
    """Every command in a block of the pages, and in the commands' own descriptions."""
    pages = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *(ROOT / "docs").glob("*.md")]
    fence = re.compile(r"^```\w*\n(.*?)^```", re.MULTILINE | re.DOTALL)
    blocks = [block for page in pages for block in fence.findall(page.read_text())]
    blocks += [parser_of(command).description or "" for command in COMMANDS]
    joined = "\n".join(blocks).replace("\\\n", " ")
    return re.findall(r"^ *tekfac (.*?)(?:   .*)?$", joined, re.MULTILINE)


def test_every_command_that_is_shown_can_be_given() -> None:
    shown = shown_commands()
    assert {command.split()[0] for command in shown} == set(COMMANDS)
    for command in shown:
        name, *arguments = shlex.split(command, comments=True)
        parser_of(name).parse_args(arguments)


# -- what was meant ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["compre"], "tekfac: argument COMMAND: 'compre' is unknown. Did you mean 'compare'? tekfac --help"),
        (["--verison"], "tekfac: there is no argument '--verison'. Did you mean '--version'? tekfac --help"),
        ([], "tekfac: expected a command: compare, train, "),
        (
            ["train", "--optimizr", "sgd"],
            "no argument '--optimizr'. Did you mean '--optimizer'? tekfac train --help",
        ),
        (["compare", "--optimizr=sgd"], "no argument '--optimizr'. Did you mean '--optimizers'?"),
        (["fisher", "--network", "x"], "tekfac fisher: there is no argument '--network'. tekfac fisher --help"),
        (
            ["data", "check", ".", "--nmae", "x"],
            "tekfac data check: there is no argument '--nmae'. Did you mean",
        ),
        (["train", "stray"], "there is no argument 'stray'. tekfac train --help lists all arguments."),
        (
            ["explain", "--classes", "0"],
            "argument --classes: '0' is not a positive whole number. tekfac explain",
        ),
        (["fisher", "--samples", "x"], "argument --samples: 'x' is not a positive whole number. tekfac fisher"),
    ],
)
def test_a_wrong_argument_is_told_in_a_line(
    arguments: list[str], told: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        main(arguments)
    err = capsys.readouterr().err
    assert ended.value.code == 2
    assert told in err
    assert "?." not in err
    assert len(err.splitlines()) == 1


# -- one way to name a model ---------------------------------------------------------------------------------

NETS = """
from torch import nn
def whole(channels, classes, size): return nn.Sequential(nn.Flatten(), nn.Linear(channels * size**2, classes))
def part(classes, width=4): return nn.Sequential(nn.Flatten(), nn.Linear(64, width), nn.Linear(width, classes))
def ready(): return nn.Sequential(nn.Flatten(), nn.Linear(64, 10))
def preset(channels=1, classes=10, size=8): return whole(channels, classes, size)
"""

DATA = """
import torch
def loader(): return [(torch.rand(6, 1, 8, 8), torch.arange(6))]
"""


@pytest.fixture
def _here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("nets.py").write_text(NETS)
    Path("batches.py").write_text(DATA)


@pytest.mark.usefixtures("_here")
@pytest.mark.parametrize("function", ["whole", "part", "ready", "preset"])
def test_the_same_function_is_a_model_for_every_command(function: str) -> None:
    model = ["--model", f"nets.py:{function}"]
    images = ["--channels", "1", "--classes", "10", "--size", "8"]
    short = ["--epochs", "1", "--train-samples", "64", "--test-samples", "20", "--quiet"]
    assert main(["train", *model, *short]) == 0
    assert main(["explain", *model, *images]) == 0
    data = ["--data", "batches.py:loader", "--no-figures", "--quiet"]
    assert main(["fisher", *model, *images, *data]) == 0


@pytest.mark.usefixtures("_here")
def test_a_model_gets_what_is_given_and_its_own_defaults_else(capsys: pytest.CaptureFixture[str]) -> None:
    def parameters(*arguments: str) -> int:
        assert main(["explain", "--json", *arguments]) == 0
        return sum(layer["parameters"] for layer in json.loads(capsys.readouterr().out)["layers"])

    assert parameters("--model", "nets.py:preset") == 65 * 10
    assert parameters("--model", "nets.py:preset", "--classes", "3") == 65 * 3
    assert (
        parameters("--model", "nets.py:part", "--classes", "3", "--model-option", "width=2") == 65 * 2 + 3 * 3
    )
    assert (
        parameters("--model", "mlp", "--channels", "1", "--classes", "3", "--size", "2")
        == 128 * 5 + 64 * 129 + 3 * 65
    )


@pytest.mark.usefixtures("_here")
def test_a_model_that_needs_to_know_the_images_says_how_to_tell_it(capsys: pytest.CaptureFixture[str]) -> None:
    for arguments, told in (
        (
            ["explain", "--model", "nets.py:whole", "--size", "8"],
            "nets.py:whole asks for channels, classes. Add",
        ),
        (["explain", "--model", "cnn"], "Add --channels N --classes N --size N."),
        (["fisher", "--model", "nets.py:part", "--data", "batches.py:loader"], "Add --classes N."),
        (
            ["explain", "--model", "nets.py:part", "--classes", "3", "--model-option", "wdth=2"],
            "Did you mean 'width'?",
        ),
        (["explain"], "There is no model to explain. Add --model NAME"),
    ):
        assert main(arguments) == 1
        assert told in capsys.readouterr().err


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("5", 5),
        ("0.5", 0.5),
        ("[1, 2]", [1, 2]),
        ("true", True),
        ("False", False),
        ("None", None),
        ("exact", "exact"),
    ],
)
def test_values_of_settings_are_read_as_toml_or_python_writes_them(text: str, value: object) -> None:
    assert pair(f"key={text}") == ("key", value)
