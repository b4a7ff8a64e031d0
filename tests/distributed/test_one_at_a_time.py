"""Over gloo no two operations are under way at once: torch has been seen to corrupt its memory then."""

from __future__ import annotations

from typing import Any

import pytest
import torch.distributed as dist
from tests.distributed.processes import in_processes
from tests.distributed.training import build, train
from torch.distributed.tensor import DTensor


class _Watch:
    """Counts the broadcasts that nobody has waited for when shards are put together."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.under_way = 0
        self.broadcasts = 0
        self.overlaps: list[int] = []
        self._broadcast, self._full_tensor = dist.broadcast, DTensor.full_tensor
        watch = self
        monkeypatch.setattr(dist, "broadcast", self._begin)
        monkeypatch.setattr(DTensor, "full_tensor", lambda shards, **options: watch._gather(shards, **options))

    def _begin(self, *args: Any, **options: Any) -> Any:
        work = self._broadcast(*args, **options)
        if work is None:
            return None
        self.under_way += 1
        self.broadcasts += 1
        return _Work(work, self)

    def _gather(self, shards: DTensor, **options: Any) -> Any:
        self.overlaps.append(self.under_way)
        return self._full_tensor(shards, **options)


class _Work:
    def __init__(self, work: Any, watch: _Watch) -> None:
        self._work, self._watch = work, watch

    def wait(self) -> None:
        self._work.wait()
        self._watch.under_way -= 1


def _watched_training() -> tuple[int, int, int]:
    with pytest.MonkeyPatch.context() as monkeypatch:
        watch = _Watch(monkeypatch)
        train(build("kronecker", "fsdp"), 0, 12)
        return watch.broadcasts, len(watch.overlaps), max(watch.overlaps)


@pytest.mark.distributed
@pytest.mark.slow
def test_shards_are_put_together_only_when_no_broadcast_is_under_way(tmp_path):
    for broadcasts, gatherings, most_under_way in in_processes(2, tmp_path, _watched_training):
        assert broadcasts > 12 and gatherings > 12  # both happened, in every step
        assert most_under_way == 0
