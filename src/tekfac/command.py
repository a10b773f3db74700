"""The command line: `tekfac COMMAND ...`."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from tekfac.fisher import command as fisher_command
from tekfac.version import __version__


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command; what went wrong is said in one line, and is the exit status."""
    parser = argparse.ArgumentParser(prog="tekfac", description="Natural gradient and Fisher approximations.")
    parser.add_argument("--version", action="version", version=f"tekfac {__version__}")
    commands = parser.add_subparsers(title="commands", required=True, metavar="COMMAND")
    fisher_command.add_to(commands)
    options = parser.parse_args(arguments)
    try:
        options.run(options)
    except (ValueError, TypeError, ImportError, OSError) as error:
        print(f"tekfac: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("tekfac: interrupted", file=sys.stderr)
        return 130
    return 0
