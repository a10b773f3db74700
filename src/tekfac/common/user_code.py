"""Functions of the user's own, named on the command line."""

from __future__ import annotations

import importlib
import importlib.util
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tekfac.common.checks import nearest


def find_function(name: str, option: str) -> Callable[..., Any]:
    """The function that `package.module:function` or `path/to/file.py:function` names.

    Raises:
        ValueError: if there is no such module or function.
    """
    place, _, attribute = name.rpartition(":")
    if not place:
        raise ValueError(
            f"Cannot read {option} {name!r}. Expected package.module:function or path/to/file.py:function."
        )
    try:
        module = _from_file(Path(place)) if place.endswith(".py") else _from_name(place)
    except (Exception, SystemExit) as error:
        reason = str(error) if isinstance(error, FileNotFoundError) else f"{type(error).__name__}: {error}"
        raise ValueError(f"Cannot import {place!r} for {option}: {reason}") from error
    function = getattr(module, attribute, None)
    if not callable(function):
        names = [n for n, value in vars(module).items() if callable(value) and not n.startswith("_")]
        raise ValueError(f"{place!r} has no function {attribute!r} for {option}.{nearest(attribute, names)}")
    return function  # type: ignore[no-any-return]


def _from_name(name: str) -> Any:
    """A module, also one of the current folder."""
    if "" not in sys.path and str(Path.cwd()) not in sys.path:
        sys.path.insert(0, str(Path.cwd()))
    return importlib.import_module(name)


def _from_file(path: Path) -> Any:
    """A file as a module, which may import its neighbours, then and later."""
    if not path.is_file():
        raise FileNotFoundError(f"no file {str(path)!r}")
    path = path.resolve()
    name = f"_tekfac_user_{path.stem}"
    known = sys.modules.get(name)
    if known is not None and getattr(known, "__file__", None) == str(path):
        return known
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    if str(path.parent) not in sys.path:
        sys.path.insert(0, str(path.parent))
    sys.modules[name] = module
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    return module
