"""The command ``apo``: every figure and table of the paper from the command line.

Exit codes: 0 success, 1 a run failed or diverged, 2 the user can fix it, 3 the time limit has passed, 130 interrupted.
"""

from __future__ import annotations

import argparse
import os
import shlex
import sys
import traceback
from collections.abc import Sequence
from contextlib import suppress
from typing import NoReturn

from apo_experiments.commands import data, list_recipes, plot, publish, report, run, sweep
from apo_experiments.errors import UserError, needs_extra
from apo_experiments.interruption import TimeIsUp

_EXAMPLES = """\
examples:
  apo list                                the recipes, and how long they take
  apo run all --scale smoke               try everything in a few minutes
  apo run rosenbrock --scale paper        one figure of the paper
  apo report --out report.html            a page with all figures and tables

`apo COMMAND --help` has more examples."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command.

    Args:
        arguments: What follows the program's name; the process's own by default.

    Returns:
        The exit code.
    """
    words = list(sys.argv[1:] if arguments is None else arguments)
    parsed = _parser().parse_args(words)
    try:
        return _execute(parsed, words)
    finally:
        _discard_unread_output()


def _execute(parsed: argparse.Namespace, words: Sequence[str]) -> int:
    try:
        return parsed.execute(parsed)
    except UserError as error:
        _complain(str(error), parsed.debug)
        return 2
    except ModuleNotFoundError as error:
        _complain(needs_extra(error), parsed.debug)
        return 2
    except KeyboardInterrupt as error:
        time_is_up = isinstance(error, TimeIsUp)
        again = f" Continue with: {shlex.join(['apo', *words])}" if parsed.resumable else ""
        _say(f"{'the time limit has passed' if time_is_up else 'interrupted'}.{again}")
        return 3 if time_is_up else 130
    except BrokenPipeError:
        # The reader of our output, such as `head`, has closed it. For a command that only prints, that is no error.
        return int(parsed.resumable)
    except Exception as error:
        hint = "" if parsed.debug else " (run with --debug for the traceback)"
        _complain(f"{type(error).__name__}: {error}{hint}", parsed.debug)
        return 1


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(
        prog="apo",
        description="Repeat the experiments of Amortized Proximal Optimization (Bae, Vicol, HaoChen, Grosse, 2022).",
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action=_Version, nargs=0, help="show the version and exit")
    parser.add_argument("--debug", action="store_true", help="show tracebacks")
    subparsers = parser.add_subparsers(metavar="COMMAND", required=True, title="commands")
    for command in (list_recipes, run, sweep, plot, report, publish, data):
        command.add_to(subparsers)
    return parser


class _Parser(argparse.ArgumentParser):
    """Reports an error in one sentence, without the usage."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: {message}; `{self.prog} --help` has examples.\n")


class _Version(argparse.Action):
    """Imports the library, which takes seconds, only when it is used."""

    def __call__(self, parser: argparse.ArgumentParser, *rest: object) -> None:
        import apo

        print(f"apo {apo.__version__}")
        parser.exit()


def _complain(sentence: str, debug: bool) -> None:
    with suppress(OSError):
        if debug:
            traceback.print_exc()
    _say(sentence)


def _say(sentence: str) -> None:
    with suppress(OSError):  # the exit code says it too
        print(f"apo: {sentence}", file=sys.stderr)


def _discard_unread_output() -> None:
    """Discard output to a closed pipe, so that Python's flush at exit neither complains nor changes the exit code."""
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except BrokenPipeError:
            os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())


if __name__ == "__main__":
    sys.exit(main())
