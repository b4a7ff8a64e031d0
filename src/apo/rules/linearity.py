r"""Probe whether one step of an optimizer is proportional to its learning rate.

The learning-rate rule rests on :math:`\Delta = \eta\, d` with :math:`d` independent of :math:`\eta`. Most of torch's
optimizers have it; ASGD, Rprop, LBFGS and Adafactor do not. Nothing is assumed: a copy of the optimizer takes a few
steps on two small tensors, then the same step at several rates.
"""

from __future__ import annotations

import copy
from collections import OrderedDict, defaultdict

import torch
from torch import Tensor
from torch.optim import Optimizer

from apo.errors import NotLinearError

__all__ = ["check_linear_in_lr"]

_RATES = (1e-3, 1.0, 64.0)
_TOLERANCE = 1e-3


def check_linear_in_lr(optimizer: Optimizer) -> None:
    """Raise unless the optimizer's step is proportional to ``lr``.

    Raises:
        NotLinearError: It is not, or the probe could not run.
    """
    name = type(optimizer).__name__
    if any(group.get("maximize") for group in optimizer.param_groups):
        raise NotLinearError(f"{name} has maximize=True, which apo does not support: minimise the negative instead")
    try:
        steps = {rate: _probe_step(optimizer, rate) for rate in _RATES}
    except Exception as error:
        raise NotLinearError(
            f"{name} could not be probed for a step that is linear in lr ({type(error).__name__}: {error}): "
            "use SGD, Adam, AdamW or another first-order optimizer, or pass check_linear=False if you know that it is"
        ) from error
    per_unit = {rate: step / rate for rate, step in steps.items()}
    reference = per_unit[1.0]
    for direction in per_unit.values():
        if not torch.linalg.vector_norm(direction - reference) <= _TOLERANCE * torch.linalg.vector_norm(reference):
            raise NotLinearError(
                f"the step of {name} is not proportional to its lr, so apo cannot learn the rate: "
                "use SGD, Adam, AdamW, RMSprop, NAdam, Adamax, Muon or another optimizer that is"
            )


def _probe_step(optimizer: Optimizer, rate: float) -> Tensor:
    """Return the displacement of the third step, taken at ``rate`` after two steps at 1."""
    probe, parameters = _small_copy(optimizer)
    generator = torch.Generator().manual_seed(0)
    before: list[Tensor] = []
    for lr in (1.0, 1.0, rate):
        for group in probe.param_groups:
            group["lr"] = torch.full_like(group["lr"], lr) if isinstance(group["lr"], Tensor) else lr
        before = [p.detach().clone() for p in parameters]
        for p in parameters:
            p.grad = torch.randn(p.shape, generator=generator, dtype=torch.float64).to(p)
        probe.step()
    return torch.cat([(p.detach() - old).reshape(-1) for p, old in zip(parameters, before, strict=True)]).double().cpu()


def _shrunk(value: object, parameter: Tensor, small: Tensor) -> object:
    """Return a value of a parameter's state for a smaller parameter."""
    if not isinstance(value, Tensor):
        return copy.deepcopy(value)
    if value.shape != parameter.shape:
        return value.detach().clone()
    return torch.full_like(small, float(value.detach().float().mean()), requires_grad=False)


def _small_copy(optimizer: Optimizer) -> tuple[Optimizer, list[Tensor]]:
    """Copy an optimizer onto two small matrices, without its state, its hooks and its schedulers."""
    probe = copy.copy(optimizer)
    for name in [name for name in vars(probe) if name.endswith("_hooks")]:
        setattr(probe, name, OrderedDict())
    vars(probe).pop("step", None)  # a scheduler binds a wrapper to the original
    probe.state = defaultdict(dict)
    probe.param_groups, parameters = [], []
    for group in [group for group in optimizer.param_groups if group["params"]][:1]:
        device = group["params"][0].device
        dtype = torch.float32 if group["params"][0].dtype in (torch.float16, torch.bfloat16) else torch.float64
        fused = group.get("fused")
        small = [torch.linspace(-1, 1, 12, dtype=torch.float32 if fused else dtype, device=device).reshape(3, 4)]
        small.append(small[0].flip(0).clone())
        parameters += [p.requires_grad_() for p in small]
        probe.param_groups.append({**group, "params": small})
        # Some optimizers make their state when they are built (Adagrad, in older torch), so an empty one would not do.
        state = optimizer.state.get(group["params"][0], {})
        for p in small:
            probe.state[p] = {key: _shrunk(value, group["params"][0], p) for key, value in state.items()}
    return probe, parameters
