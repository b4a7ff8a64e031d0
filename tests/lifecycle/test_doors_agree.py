from __future__ import annotations

import pytest
import torch
from tests.lifecycle.harness import (
    DOORS,
    RULES,
    Run,
    assert_same_run,
    batch,
    network_with_dropout_and_batchnorm,
    plain_network,
    saved_and_loaded,
)
from torch.utils.data import DataLoader, TensorDataset


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("network", [plain_network, network_with_dropout_and_batchnorm])
def test_both_doors_take_the_same_steps_bit_for_bit(rule, network):
    explicit, attached = Run("explicit", rule, network), Run("attached", rule, network)
    torch.manual_seed(1)
    explicit.train(range(11))
    stream = torch.get_rng_state()
    torch.manual_seed(1)
    attached.train(range(11))
    assert_same_run(explicit, attached)
    assert torch.equal(stream, torch.get_rng_state())
    assert len(explicit.tuner.history) >= 4


@pytest.mark.parametrize("fsd_batch", ["previous", "same", [batch(500), batch(501)]], ids=["previous", "same", "list"])
def test_both_doors_use_the_same_batches_for_the_function_space_term(fsd_batch):
    runs = []
    for door in DOORS:
        run = Run(door, "adam", network_with_dropout_and_batchnorm, fsd_batch=fsd_batch)
        torch.manual_seed(1)
        runs.append(run.train(range(8)))
    assert_same_run(*runs)
    assert runs[0].tuner.history[-1].fsd > 0


@pytest.mark.parametrize("door", DOORS)
def test_off_meta_steps_the_weights_move_as_the_bare_optimizer_moves_them(door):
    run = Run(door, interval=100)
    run.train(range(1))
    bare = plain_network()
    bare.load_state_dict(run.model.state_dict())
    optimizer = torch.optim.SGD(bare.parameters(), lr=run.lr, momentum=0.9)
    optimizer.load_state_dict(saved_and_loaded(run.optimizer.state_dict()))  # ignores what is not its own
    for index in range(1, 6):
        inputs, target = batch(index)
        optimizer.zero_grad()
        torch.nn.functional.cross_entropy(bare(inputs), target).backward()
        optimizer.step()
    run.train(range(1, 6))
    assert all(torch.equal(a, b) for a, b in zip(run.model.parameters(), bare.parameters(), strict=True))


@pytest.mark.parametrize("door", DOORS)
def test_a_shuffling_loader_for_the_function_space_term_leaves_trainings_random_stream_alone(door):
    data = TensorDataset(*batch(500, size=40))
    runs = []
    for fsd_batch in ("same", DataLoader(data, batch_size=16, shuffle=True)):
        run = Run(door, network=network_with_dropout_and_batchnorm, fsd_batch=fsd_batch)
        torch.manual_seed(1)
        runs.append((run.train(range(11)), torch.get_rng_state()))
    assert torch.equal(runs[0][1], runs[1][1])
    assert len(runs[1][0].tuner.history) == 4
