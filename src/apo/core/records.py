"""What every meta-step leaves behind for its users to read, plot and log."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from typing import Any, overload

__all__ = ["History", "MetaStep", "tensorboard"]


@dataclass(frozen=True)
class MetaStep:
    """The record of one meta-step.

    Attributes:
        step: Index of the training step, from 0.
        loss: The loss term of Q at the weights before the step, coupled weight decay included.
        look_ahead_loss: The same at the look-ahead weights theta'.
        fsd: Function-space discrepancy between theta' and theta on B', before its weight.
        wsd: Weight-space discrepancy, half the squared length of the look-ahead, before its weight.
        objective: Q = look_ahead_loss + fsd_weight * fsd + wsd_weight * wsd (both weights times the factor, if the loop
            back-propagates less than its whole loss).
        meta_gradient_norm: Norm of the gradient of Q with respect to phi.
        lr: The rate in force after the meta-step, one per param group.
        updated: Whether phi moved (False: the meta-gradient was not finite).
        summary: Further figures of the rule, such as the size of a preconditioner.
        warnings: What the rule and the objective had to say; each sentence is also shown once as an ``ApoWarning``.

    Example:
        >>> record = MetaStep(0, 2.0, 1.9, 0.01, 0.5, 1.903, 0.2, (0.1,), True)
        >>> record.scalars()["lr/0"]
        0.1
    """

    step: int
    loss: float
    look_ahead_loss: float
    fsd: float
    wsd: float
    objective: float
    meta_gradient_norm: float
    lr: tuple[float, ...]
    updated: bool
    summary: dict[str, float] = field(default_factory=dict)
    warnings: tuple[str, ...] = ()

    def scalars(self, prefix: str = "") -> dict[str, float]:
        """Return all figures by name, ready for a logger; ``prefix`` is the first part of the names."""
        names = ("loss", "look_ahead_loss", "fsd", "wsd", "objective", "meta_gradient_norm")
        values = {name: getattr(self, name) for name in names}
        values |= {f"lr/{index}": rate for index, rate in enumerate(self.lr)}
        return {f"{prefix}/{name}" if prefix else name: value for name, value in (values | self.summary).items()}


class History:
    """The latest records, oldest first; iterate over it, index it, take its length.

    Example:
        >>> history = History(limit=100)
        >>> len(history)
        0
    """

    def __init__(self, limit: int) -> None:
        self._records: deque[MetaStep] = deque(maxlen=limit)

    def append(self, record: MetaStep) -> None:
        """Add a record; the oldest is dropped when the limit is reached."""
        self._records.append(record)

    def __iter__(self) -> Iterator[MetaStep]:
        return iter(self._records)

    def __len__(self) -> int:
        return len(self._records)

    @overload
    def __getitem__(self, index: int) -> MetaStep: ...

    @overload
    def __getitem__(self, index: slice) -> list[MetaStep]: ...

    def __getitem__(self, index: int | slice) -> MetaStep | list[MetaStep]:
        return list(self._records)[index] if isinstance(index, slice) else self._records[index]

    def column(self, name: str) -> list[float]:
        """Return one figure over time, by its name in :meth:`MetaStep.scalars`."""
        return [record.scalars()[name] for record in self._records]

    def state_dict(self) -> list[dict[str, Any]]:
        """Return plain data that ``torch.load(weights_only=True)`` accepts."""
        return [asdict(record) for record in self._records]

    def load_state_dict(self, state: list[dict[str, Any]]) -> None:
        """Replace all records."""
        self._records.clear()
        for entry in state:  # files of 0.1 have no warnings
            sequences: dict[str, Any] = {name: tuple(entry.get(name, ())) for name in ("lr", "warnings")}
            self._records.append(MetaStep(**{**entry, **sequences}))


def tensorboard(writer: Any, prefix: str = "apo") -> Callable[[MetaStep], None]:
    """Make a callback that writes every figure of every meta-step as a TensorBoard scalar.

    Args:
        writer: A ``torch.utils.tensorboard.SummaryWriter`` or anything with its ``add_scalar``.
        prefix: First part of the tags.

    Example:
        >>> class Printer:
        ...     def add_scalar(self, tag, value, step):
        ...         print(tag, value, step) if tag.endswith("lr/0") else None
        >>> tensorboard(Printer())(MetaStep(10, 2.0, 1.9, 0.01, 0.5, 1.903, 0.2, (0.1,), True))
        apo/lr/0 0.1 10
    """

    def write(record: MetaStep) -> None:
        for name, value in record.scalars(prefix).items():
            writer.add_scalar(name, value, record.step)

    return write
