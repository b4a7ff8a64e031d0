"""Muon for the matrices of a network and AdamW for everything else, as one optimizer.

Muon's step is scaled to the size of AdamW's ("match_rms_adamw"), so that one rate can serve both, and APO can learn it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, final

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

import apo
from apo.rules import tail
from apo_experiments.errors import UserError


@final
class MuonAndAdamW(Optimizer):
    """Two optimizers of torch that share one dictionary of states, which is this optimizer's.

    Muon is for matrices that are no tables of embeddings.

    Args:
        model: The network.
        lr: The rate.
        momentum: Of Muon.
        betas: Of AdamW.
        weight_decay: Of both, decoupled.
        adamw_lr: The rate of AdamW, if it is another.

    Raises:
        UserError: This torch has no Muon.

    Example:
        >>> model = nn.Linear(3, 2)
        >>> optimizer = MuonAndAdamW(model, lr=0.01)
        >>> [group["part"] for group in optimizer.param_groups]
        ['muon', 'adamw']
        >>> model(torch.ones(1, 3)).sum().backward()
        >>> optimizer.step()
        >>> sorted(optimizer.state[model.weight]), sorted(optimizer.state[model.bias])
        (['momentum_buffer', 'steps'], ['exp_avg', 'exp_avg_sq', 'step'])
    """

    def __init__(
        self,
        model: nn.Module,
        lr: float,
        momentum: float = 0.95,
        betas: tuple[float, float] = (0.9, 0.999),
        weight_decay: float = 0.0,
        adamw_lr: float | None = None,
    ) -> None:
        if not hasattr(torch.optim, "Muon"):
            raise UserError(f"Muon needs torch 2.9 or newer, this is {torch.__version__}: install a newer torch.")
        lookups = {p for module in model.modules() if isinstance(module, nn.Embedding) for p in module.parameters()}
        trained = [p for p in model.parameters() if p.requires_grad]
        hidden = [p for p in trained if p.ndim == 2 and p not in lookups]
        rest = [p for p in trained if p.ndim != 2 or p in lookups]
        options = {"momentum": momentum, "weight_decay": weight_decay, "adjust_lr_fn": "match_rms_adamw"}
        parts: dict[str, Optimizer] = {}
        if hidden:
            parts["muon"] = torch.optim.Muon(hidden, lr=lr, **options)
        if rest:
            rate = lr if adamw_lr is None else adamw_lr
            parts["adamw"] = torch.optim.AdamW(rest, lr=rate, betas=betas, weight_decay=weight_decay)
        groups = [{**group, "part": name} for name, part in parts.items() for group in part.param_groups]
        super().__init__(groups, {"lr": lr})
        self._parts = parts

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> None:  # type: ignore[override]
        """Take a step with both."""
        assert closure is None
        for name, part in self._parts.items():
            # Loading a state replaces groups and states, and so does a copy of the optimizer.
            part.param_groups = [group for group in self.param_groups if group["part"] == name]
            part.state = self.state
            part.step()
        for group in self.param_groups:
            if group["part"] == "muon":  # which does not count its steps; the tail of the first one differs
                for p in group["params"]:
                    self.state[p]["steps"] = self.state[p].get("steps", 0) + 1


def _tail(gradient: Tensor, state: dict[str, Any], group: dict[str, Any]) -> Tensor:
    """Return what a gradient will cause in all, by the library's own formula for the part that it goes to."""
    kind = torch.optim.Muon if group["part"] == "muon" else torch.optim.AdamW
    return -tail._TAILS[kind]([gradient], [state], group, [state.get("steps") == 1], 1.0)[0]


apo.register_tail(MuonAndAdamW, _tail)
