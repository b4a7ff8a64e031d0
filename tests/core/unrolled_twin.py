"""One meta-step of the engine beside the same one through `apo.reference.unrolled_meta_gradient`."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from tests.core.networks import Batch
from tests.core.scripted import meta_gradients
from torch import Tensor, nn

import apo
from apo.reference import ProximalTerms, batch_gradient, unrolled_meta_gradient

#: Maps the model, its optimizer (both as they were before the step) and the named gradient to `(theta, phi) -> theta'`.
MakeUpdate = Callable[[nn.Module, Any, Mapping[str, Tensor]], Callable]


@dataclass(frozen=True)
class Pair:
    """What the engine found, and what the unrolled graph gives."""

    record: apo.MetaStep
    found: list[Tensor]
    terms: ProximalTerms
    expected: dict[str, Tensor]

    def assert_equal(self, rtol: float = 1e-10) -> None:
        for gradient, oracle in zip(self.found, self.expected.values(), strict=True):
            assert torch.linalg.vector_norm(oracle) > 1e-9, "a meta-gradient of nearly nothing proves nothing"
            error = torch.linalg.vector_norm(gradient - oracle.reshape(gradient.shape))
            assert error <= rtol * torch.linalg.vector_norm(oracle)
        pairs = {
            "look_ahead_loss": self.terms.loss,
            "fsd": self.terms.fsd,
            "wsd": self.terms.wsd,
            "objective": self.terms.total,
        }
        for name, oracle in pairs.items():
            torch.testing.assert_close(getattr(self.record, name), oracle.item(), rtol=rtol, atol=1e-14, msg=name)


def run(
    tuner: apo.APO,
    batches: list[Batch],
    phi: Mapping[str, Tensor],
    make_update: MakeUpdate,
    *,
    weight_decay: float | Mapping[str, float] = 0.0,
    changes: Mapping[str, Any] | None = None,
) -> Pair:
    """Trains on `batches`; the last one's meta-step is compared with the unrolled one.

    Args:
        tuner: Built so that the last step is a meta-step, with `Scripted` as its meta-optimizer.
        batches: The training batches.
        phi: The meta-parameters in force, by name, in the rule's order.
        make_update: Builds the unrolled update.
        weight_decay: Coupled decay, which belongs to the loss term.
        changes: Other arguments for the reference than the ones that follow from the tuner.
    """
    for inputs, target in batches[:-1]:
        tuner.step(inputs, target)
    assert tuner.is_meta_step(), "the last batch is meant to be that of a meta-step"
    model, optimizer = copy.deepcopy((tuner.model, tuner.optimizer))
    before = torch.get_rng_state()
    tuner.step(*batches[-1])
    loss = tuner.engine.criterion
    setting = {
        "loss": loss,
        "batch": batches[-1],
        "fsd_batch": batches[-2:][0],  # before there is a previous batch, B' is B
        "discrepancy": tuner.objective.discrepancy,
        "fsd_weight": tuner.objective.fsd_weight,
        "wsd_weight": tuner.objective.wsd_weight,
        "weight_decay": weight_decay,
        "loss_randomness": before,
        "fsd_randomness": torch.get_rng_state(),  # a meta-step begins, and leaves the stream, where the forward ended
    } | dict(changes or {})
    gradient = batch_gradient(model, loss=loss, batch=batches[-1], randomness=before)
    terms, expected = unrolled_meta_gradient(model, make_update(model, optimizer, gradient), phi, **setting)
    return Pair(tuner.history[-1], meta_gradients(tuner.rule), terms, expected)
