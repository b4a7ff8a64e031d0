"""The command ``apo``: every figure and table of the paper from the command line.

Written with argparse: click and typer have no options with several values, such as ``--method SGDm KFAC``. What a
command does is in its module of :mod:`apo_experiments.commands`, which is imported when the command is carried out:
torch takes seconds, and ``--help`` should not wait for it.

Exit codes: 0 success, 1 a run failed or diverged, 2 the user can fix it, 3 the time limit has passed, 130 interrupted.
"""

from __future__ import annotations

import argparse
import importlib
import os
import shlex
import sys
import traceback
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import NoReturn

from apo_experiments.errors import UserError
from apo_experiments.interruption import TimeIsUp

SCALES = ("smoke", "cpu", "paper")

_EXAMPLES = """\
examples:
  apo list                                the recipes, and how long they take
  apo run all --scale smoke               try everything in a few minutes
  apo run rosenbrock --scale paper        one figure of the paper
  apo report --out report.html            a page with all figures and tables

`apo COMMAND --help` has more examples."""

_LIST = """\
  apo list                 all recipes
  apo list uci-protein     its methods, settings and grids"""

_RUN = """\
  apo run rosenbrock                              minutes on two cores
  apo run all --scale smoke                       every recipe, in seconds each
  apo run uci-protein --scale paper --device cuda
  apo run mnist-mlp --method SGDm-APO --seeds 3 --set lr=0.01
  apo run cifar10-lenet --scale paper --best --jobs 12 --time-limit 540
  apo run cifar10-lenet --scale paper --best --storage postgresql://user@host/apo
After Ctrl-C the same command resumes the run; finished runs are not repeated."""

_SWEEP = """\
  apo sweep uci-protein --method SGDm KFAC
  apo sweep cifar10-lenet --scale paper --storage postgresql://user@host/apo    (the same on any number of machines)
  apo sweep mnist-mlp --trials 5 --jobs 2 --epochs 10
  apo sweep cifar10-lenet --scale paper --epochs 40 --grid lr=0.1,0.03 --jobs 12 --time-limit 540
After Ctrl-C the same command resumes the sweep; finished trials are not repeated."""

_PLOT = """\
  apo plot                               all recipes that have records, png and pdf
  apo plot rosenbrock --out figures      one of them
  apo plot mnist-mlp --scale cpu --figure bars"""

_REPORT = """\
  apo report                                      apo-report.html from ./runs
  apo report --out page.html --runs elsewhere
  apo report --scale paper                        leave out the smaller scales"""

_PUBLISH = """\
  apo publish                                    all finished runs of the scale paper, at full length
  apo publish cifar10-lenet --runs elsewhere
  apo publish rosenbrock --scale cpu --all       runs of any length
Records go to results/, tables and figures to docs/ of a clone. A record that is there stays as it is (delete it to
publish its run again), so publishing twice changes nothing."""

_DATA = """\
  apo data list                     all data sets, and which are present
  apo data fetch mnist protein      download from the official addresses
  apo data verify                   compare all present files with their checksums"""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command.

    Args:
        arguments: What follows the program's name; the process's own by default.

    Returns:
        The exit code.
    """
    words = list(sys.argv[1:] if arguments is None else arguments)
    parsed = parser().parse_args(words)
    try:
        return _execute(parsed, words)
    finally:
        # Output to a closed pipe is discarded, so that Python's flush at exit neither complains nor changes the code.
        for stream in (sys.stdout, sys.stderr):
            try:
                stream.flush()
            except BrokenPipeError:
                os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())


def _execute(parsed: argparse.Namespace, words: Sequence[str]) -> int:
    try:
        return importlib.import_module(f"apo_experiments.commands.{parsed.module}").execute(parsed)
    except KeyboardInterrupt as error:
        time_is_up = isinstance(error, TimeIsUp)
        again = f" Continue with: {shlex.join(['apo', *words])}" if parsed.resumable else ""
        _complain(f"{'the time limit has passed' if time_is_up else 'interrupted'}.{again}")
        return 3 if time_is_up else 130
    except BrokenPipeError:
        # The reader of our output, such as `head`, has closed it. For a command that only prints, that is no error.
        return int(parsed.resumable)
    except UserError as error:
        _complain(str(error), parsed.debug)
        return 2
    except ModuleNotFoundError as error:
        package, install = (error.name or str(error)).partition(".")[0], "pip install 'apo-optim[experiments]'"
        _complain(f"The command apo needs {package}, which is not installed: run {install}.", parsed.debug)
        return 2
    except Exception as error:
        hint = "" if parsed.debug else " (run with --debug for the traceback)"
        _complain(f"{type(error).__name__}: {error}{hint}", parsed.debug)
        return 1


def _complain(sentence: str, debug: bool = False) -> None:
    with suppress(OSError):  # the exit code says it too
        if debug:
            traceback.print_exc()
        print(f"apo: {sentence}", file=sys.stderr)


def parser() -> argparse.ArgumentParser:
    """Return the parser of all commands."""
    top = _Parser(
        prog="apo",
        description="Repeat the experiments of Amortized Proximal Optimization (Bae, Vicol, HaoChen, Grosse, 2022).",
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    top.add_argument("--version", action=_Version, nargs=0, help="show the version and exit")
    top.add_argument("--debug", action="store_true", help="show tracebacks")
    commands = top.add_subparsers(metavar="COMMAND", required=True, title="commands")

    def command(
        name: str, summary: str, examples: str, resumable: bool = False, module: str = ""
    ) -> Callable[..., argparse.Action]:
        """Add a command whose help ends with examples, and return what adds an option to it."""
        made = commands.add_parser(
            name,
            help=summary,
            description=summary[0].upper() + summary[1:] + ".",
            epilog=f"examples:\n{examples}",
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )
        # SUPPRESS: the default of the main parser is kept, so that --debug may come before or after the command.
        made.add_argument("--debug", action="store_true", default=argparse.SUPPRESS, help="show tracebacks")
        made.set_defaults(module=module or name, resumable=resumable)
        return made.add_argument

    add = command("list", "show the recipes, the data they need and the time they take", _LIST, module="list_recipes")
    add("recipes", metavar="RECIPE", nargs="*", help="show these in detail")
    add("--data-dir", metavar="DIR", type=Path, help="folder of the data (default: $APO_DATA)")

    add = command("run", "train recipes and compare them with the paper", _RUN, resumable=True)
    add("recipes", metavar="RECIPE", nargs="+", help="names from `apo list`, or all")
    _add_execution_options(add)
    best = (
        "use the best hyperparameters of the sweeps, from their database or, with --storage none, from the records here"
    )
    add("--best", action="store_true", help=best)
    add("--best-of", metavar="RECIPE", help="the same, from the sweeps of another recipe")
    add("--compile", action="store_true", help="train through torch.compile: faster after a minute, other rounding")

    add = command("sweep", "tune methods over the paper's grids", _SWEEP, resumable=True)
    add("recipe", metavar="RECIPE", help="a name from `apo list`")
    _add_execution_options(add)
    add("--trials", metavar="N", type=_positive, help="stop after this many (default: whole grid)")
    values = "try these values of a key instead of the paper's, as in lr=0.1,0.03"
    add("--grid", metavar="KEY=VALUES", nargs="+", action="extend", help=values)

    add = command("plot", "draw figures from the records of runs", _PLOT)
    add("recipes", metavar="RECIPE", nargs="*", default=["all"], help="names from `apo list`")
    add("--out", metavar="DIR", type=Path, default=Path("figures"), help="(default: figures)")
    add("--scale", choices=SCALES, help="(default: all that have records)")
    add("--figure", metavar="NAME", help="a figure other than the recipe's own")
    _add_runs_option(add)

    add = command("report", "write one page with all figures and tables", _REPORT)
    add("--out", metavar="FILE", type=Path, default=Path("apo-report.html"), help="(default: apo-report.html)")
    add("--scale", choices=SCALES, help="(default: all; smoke only if there is no other)")
    _add_runs_option(add)

    add = command("publish", "copy finished runs into results and bring docs up to date", _PUBLISH)
    add("recipes", metavar="RECIPE", nargs="*", help="names from `apo list` (default: all)")
    add("--scale", choices=("cpu", "paper"), default="paper", help="(default: paper)")
    add("--all", action="store_true", help="runs of any length")
    add("--to", metavar="DIR", type=Path, help="folder of the records (default: results)")
    add("--docs", metavar="DIR", type=Path, default=Path("docs"), help="with results.md (default: docs)")
    _add_runs_option(add)

    add = command("data", "list, fetch and verify data sets", _DATA)
    add("action", choices=("list", "fetch", "verify"), help="what to do")
    add("names", metavar="NAME", nargs="*", help="data sets, or all (verify: all that are present)")
    add("--data-dir", metavar="DIR", type=Path, help="their folder (default: $APO_DATA, else ~/.cache/apo-data)")
    return top


def _add_execution_options(add: Callable[..., argparse.Action]) -> None:
    """Add the options that select the runs, and where they are trained."""
    scales = "smoke: seconds, generated data; cpu: minutes on two cores; paper: as in the paper, on a GPU"
    add("--scale", choices=SCALES, default="cpu", help=f"{scales} (default: cpu)")
    methods = "only these methods (`apo list RECIPE` has them)"
    add("--method", metavar="LABEL", nargs="+", action="extend", help=methods)
    add("--seeds", metavar="N", type=_positive, help="number of seeds (default: the recipe's; in sweeps 1)")
    add("--device", choices=("auto", "cpu", "cuda"), default="auto", help="(default: auto)")
    add("--data-dir", metavar="DIR", type=Path, help="folder of the data (default: $APO_DATA)")
    settings = "change an option of the task, a hyperparameter or epochs (`apo list RECIPE` has the keys)"
    add("--set", metavar="KEY=VALUE", nargs="+", action="extend", help=settings)
    length = "how long to train; schedules are fractions of it (default: scale's)"
    add("--epochs", metavar="N", type=_positive, help=length)
    add("--jobs", metavar="N", type=_positive, default=1, help="runs in parallel, on one GPU or the CPU (default: 1)")
    limit = "stop all runs after this time, with checkpoints; the same command resumes them (exit code 3)"
    add("--time-limit", metavar="SECONDS", type=_positive, help=limit)
    add("--storage", metavar="URL", help="database of the sweeps (default: an SQLite file among the runs)")
    add("--json", metavar="FILE", type=Path, help="write the values of the table to this file")
    _add_runs_option(add)


def _add_runs_option(add: Callable[..., argparse.Action]) -> None:
    add("--runs", metavar="DIR", type=Path, help="folder of the runs (default: $APO_RUNS, else ./runs)")


def _positive(text: str) -> int:
    """Parse a number of at least 1; the type of an option."""
    number = int(text) if text.isdecimal() else 0
    if number < 1:
        raise argparse.ArgumentTypeError(f"must be a whole number of at least 1, got {text!r}")
    return number


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
