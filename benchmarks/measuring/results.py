"""What was found: rows, the machine they were found on, and the forms in which they are written."""

from __future__ import annotations

import json
import platform
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path

import torch

import apo

HEADER = ("case", "time", "spread", "one meta-step", "peak memory", "ms a step")


@dataclass(frozen=True)
class Row:
    """One case.

    Attributes:
        case: ``workload/contender``.
        ratio: Time of a step in units of the bare optimizer's.
        spread: Interquartile range of that ratio.
        peak_memory_ratio: Peak memory in units of the bare optimizer's.
        meta_step_ratio: What one meta-step adds, in bare steps; for the Kronecker rule, which makes every step dearer,
            what a whole interval adds.
        step_seconds: Median time of a step.
        bare_step_seconds: The bare optimizer's.
        peak_memory_bytes: Peak memory.
        bare_peak_memory_bytes: The bare optimizer's.
        repeats: How often 100 steps were timed.
    """

    case: str
    ratio: float
    spread: float
    peak_memory_ratio: float
    meta_step_ratio: float
    step_seconds: float
    bare_step_seconds: float
    peak_memory_bytes: int
    bare_peak_memory_bytes: int
    repeats: int

    def cells(self) -> tuple[str, ...]:
        """Return the row of a table for people."""
        return (
            self.case,
            f"{self.ratio:.3f}x",
            f"{self.spread:.3f}",
            f"{self.meta_step_ratio:.2f}",
            f"{self.peak_memory_ratio:.2f}x",
            f"{1e3 * self.step_seconds:.2f}",
        )


def environment(device: torch.device, clock: str) -> dict[str, str | int]:
    """Describe the machine and the software."""
    return {
        "device": device.type,
        "device_name": torch.cuda.get_device_name(device) if device.type == "cuda" else _processor(),
        "threads": torch.get_num_threads(),
        "clock": clock,
        "torch": torch.__version__,
        "apo": apo.__version__,
    }


def hardware_line(where: dict[str, str | int]) -> str:
    """Return one line about the machine."""
    plural = "" if where["threads"] == 1 else "s"
    threads = "" if where["device"] == "cuda" else f", {where['threads']} thread{plural}"
    return f"{where['device_name']}{threads}, {where['clock']} time, torch {where['torch']}"


def write_json(path: Path, rows: Sequence[Row], where: dict[str, str | int]) -> None:
    """Write the list of cases; every entry says where it was measured."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps([asdict(row) | where for row in rows], indent=2) + "\n")


def read_json(path: Path, where: dict[str, str | int]) -> list[Row]:
    """Return the rows of an earlier file, none if there is no file.

    Raises:
        ValueError: They were measured elsewhere or otherwise.
    """
    entries = json.loads(path.read_text()) if path.exists() else []
    for entry in entries:
        differs = [f"{key} {entry[key]}" for key in where if entry[key] != where[key]]
        if differs:
            raise ValueError(f"{path} was measured with {', '.join(differs)}: name another file")
    return [Row(**{field.name: entry[field.name] for field in fields(Row)}) for entry in entries]


def updated(earlier: Sequence[Row], rows: Sequence[Row]) -> list[Row]:
    """Put rows in the place of earlier ones of the same case, new cases behind them."""
    measured = {row.case: row for row in rows}
    kept = [measured.pop(row.case, row) for row in earlier]
    return [*kept, *measured.values()]


def text_table(rows: Sequence[Row]) -> str:
    """Return an aligned table for the terminal."""
    lines = [HEADER, *(row.cells() for row in rows)]
    widths = [max(len(line[i]) for line in lines) for i in range(len(HEADER))]
    return "\n".join(
        "  ".join(
            cell.ljust(width) if i == 0 else cell.rjust(width)
            for i, (cell, width) in enumerate(zip(line, widths, strict=True))
        )
        for line in lines
    )


def write_markdown(path: Path, rows: Sequence[Row], where: dict[str, str | int]) -> None:
    """Put the table into a Markdown file, in place of the one between this device's markers if there is one."""
    begin, end = (f"<!-- overhead {where['device']}: {word} -->" for word in ("begin", "end"))
    rule = ["---", *["---:"] * (len(HEADER) - 1)]
    lines = [HEADER, rule, *((f"`{row.case}`", *row.cells()[1:]) for row in rows)]
    table = "\n".join("| " + " | ".join(line) + " |" for line in lines)
    block = f"{begin}\n{hardware_line(where)}:\n\n{table}\n{end}"
    text = path.read_text() if path.exists() else ""
    if begin in text and end in text:
        head, rest = text.split(begin, 1)
        path.write_text(head + block + rest.split(end, 1)[1])
    else:
        path.write_text(f"{text.rstrip()}\n\n{block}\n".lstrip())


def _processor() -> str:
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        for line in cpuinfo.read_text().splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    return platform.processor() or platform.machine()
