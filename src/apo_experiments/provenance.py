"""Where a result comes from: the command, the commit, the versions and the hardware."""

from __future__ import annotations

import functools
import importlib.metadata
import os
import platform
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch

import apo
from apo_experiments import backends

#: Packages beside torch that a result may depend on.
_PACKAGES = ("numpy", "scipy", "scikit-learn", "pytorch-optimizer", "sentencepiece", "sacrebleu", "optuna")


def describe(device: torch.device) -> dict[str, Any]:
    """Return everything below, as the header of a record has it, for a run on ``device``."""
    return {"command": command(), "commit": commit(), "versions": versions(), "hardware": hardware(device)}


def command() -> list[str]:
    """Return the command line of this process, without the program's folder and without passwords in addresses."""
    program, *arguments = sys.argv or [""]
    return [Path(program).name, *(re.sub(r"(://[^/@:]*):[^/@]*@", r"\1:***@", word) for word in arguments)]


@functools.cache
def commit() -> str | None:
    """Return the commit of this source tree, ``-dirty`` if files differ from it.

    ``$APO_COMMIT`` takes precedence, for copies that are not a checkout or that git does not know about.
    """
    if told := os.environ.get("APO_COMMIT"):
        return told
    # An installed copy may be inside another repository: only a tree that tracks this file counts.
    if _git("ls-files", "--error-unmatch", Path(__file__).name) is None:
        return None
    head = _git("rev-parse", "HEAD")
    return f"{head}-dirty" if head and _git("status", "--porcelain", "--", "..") else head


def versions() -> dict[str, str]:
    """Return the versions of Python, torch, CUDA, apo and of the packages that are installed."""
    found = {"python": platform.python_version(), "torch": str(torch.__version__), "apo": apo.__version__}
    if torch.version.cuda:
        found["cuda"] = torch.version.cuda
    for name in _PACKAGES:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def hardware(device: torch.device) -> dict[str, Any]:
    """Return the names of the device and the CPU, how many threads torch uses, and the switches of a GPU."""
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else device.type
    return {"device": name, "cpu": _cpu(), "threads": torch.get_num_threads(), **backends.described(device)}


@functools.cache
def _cpu() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()


def _git(*arguments: str) -> str | None:
    """Return the output of git for the folder of this file, or None if it fails or is not installed."""
    try:
        answer = subprocess.run(
            ["git", *arguments], cwd=Path(__file__).parent, capture_output=True, text=True, timeout=10, check=True
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return answer.stdout.strip()
