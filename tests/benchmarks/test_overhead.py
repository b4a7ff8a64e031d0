import json
import subprocess
import sys
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from benchmarks.measuring.cases import MISSING, cases_for
from benchmarks.measuring.contenders import AttachedRate, Bare, LearnedRate
from benchmarks.measuring.memory import peak_memory
from benchmarks.measuring.results import Row, read_json, text_table, updated, write_json, write_markdown
from benchmarks.measuring.rivals import HAS_TORCHOPT, TorchOpt, Unrolled
from benchmarks.measuring.timing import Runner, Timing, compare, interleaved_times
from benchmarks.measuring.workloads import CPU_WORKLOADS, SMOKE_WORKLOADS

import apo

ROOT = Path(__file__).parents[2]
CPU = torch.device("cpu")
SMALL = [workload for workload in SMOKE_WORKLOADS if not workload.large]
WORKLOADS = pytest.mark.parametrize("workload", SMALL, ids=lambda workload: workload.name)
RIVALS = [Unrolled, pytest.param(TorchOpt, marks=pytest.mark.skipif(not HAS_TORCHOPT, reason="needs torchopt"))]


def overhead(*arguments):
    command = [sys.executable, str(ROOT / "benchmarks" / "overhead.py"), "--threads", "1", *map(str, arguments)]
    return subprocess.run(
        command, env={"PYTHONPATH": str(ROOT / "src")}, capture_output=True, text=True, timeout=300, check=False
    )


@pytest.mark.slow
def test_the_smallest_run_writes_the_chosen_cases_as_json_and_as_tables(tmp_path):
    options = ["--json", tmp_path / "deep" / "cases.json", "--markdown", tmp_path / "table.md"]
    run = overhead("--smoke", *options, "--cases", "cnn/lr-k10", "mlp/*")
    assert run.returncode == 0, run.stderr
    rows = json.loads((tmp_path / "deep" / "cases.json").read_text())
    names = ["cnn/lr-k10", *(f"mlp/{case}" for case in cases_for(SMALL[1]) if case not in MISSING)]
    assert [row["case"] for row in rows] == names
    assert {"mlp/lr-k10", "mlp/lr-k100", "mlp/kron-k10", "mlp/lr-k10-unrolled"} <= set(names)
    for row in rows:
        assert row["ratio"] > 0.5 and row["spread"] >= 0 and row["peak_memory_ratio"] >= 1
        assert row["device"] == "cpu" and row["threads"] == 1 and row["torch"] == torch.__version__
        assert row["case"] in run.stdout and f"`{row['case']}`" in (tmp_path / "table.md").read_text()
    for missing in MISSING:
        assert f"mlp/{missing} is left out" in run.stdout


def test_a_pattern_that_fits_no_case_is_refused_with_the_names(tmp_path):
    run = overhead("--smoke", "--json", tmp_path / "cases.json", "--cases", "rnn/*")
    assert run.returncode != 0 and "lr-k100" in run.stderr and not (tmp_path / "cases.json").exists()


@pytest.mark.parametrize("rival", RIVALS)
@WORKLOADS
def test_rivals_compute_the_meta_gradient_that_apo_computes(workload, rival):
    batches = workload.batches(CPU)
    model = workload.model(CPU).double()
    twin = rival(workload.model(CPU).double(), interval=1)
    apo_contender = LearnedRate(model, interval=1)
    rule = apo_contender.tuner.rule
    # The rivals know the loss on the step's own batch alone, and a constant over-relaxation.
    apo_contender.tuner.detach()
    plain = apo.LearningRate(rule.optimizer, over_relaxation=1.4, warm_start=False)
    apo_contender.tuner = apo.APO(plain, model, F.cross_entropy, interval=1)
    rule = plain
    seen = []
    rule.meta_optimizer.register_step_pre_hook(lambda *_: seen.append(rule.phi()[0].grad.clone()))
    twin.meta_optimizer.register_step_pre_hook(lambda *_: seen.append(twin.log_rate.grad.clone()))
    for _ in range(3):
        inputs, target = next(batches)
        apo_contender.step(inputs.double(), target)
        twin.step(inputs.double(), target)
        ours, theirs = seen
        seen.clear()
        assert ours != 0
        # the rivals hold log eta in float32, as their authors would
        torch.testing.assert_close(theirs.double(), ours.double(), rtol=1e-5, atol=0.0)
    for mine, other in zip(model.parameters(), twin.model.parameters(), strict=True):
        torch.testing.assert_close(mine, other, rtol=1e-5, atol=1e-7)


@WORKLOADS
def test_both_doors_take_the_same_steps(workload):
    doors = [Runner(partial(door, interval=2), workload, CPU) for door in (LearnedRate, AttachedRate)]
    for door in doors:
        door.run(5)
    one, other = (list(door.contender.model.parameters()) for door in doors)
    for left, right in zip(one, other, strict=True):
        torch.testing.assert_close(left, right)


@pytest.mark.slow
@pytest.mark.parametrize("workload", CPU_WORKLOADS, ids=lambda workload: workload.name)
def test_a_meta_step_needs_no_more_memory_than_the_unrolled_one(workload):
    ours, unrolled = (peak_memory(partial(kind, interval=2), workload, CPU) for kind in (LearnedRate, Unrolled))
    model = workload.model(CPU)
    kept = sum(t.numel() * t.element_size() for t in (*model.parameters(), *model.buffers()))  # the return point
    assert ours <= unrolled + kept


def test_peak_memory_counts_what_is_alive_at_once():
    class Hoarder(Bare):
        def step(self, inputs, target):
            super().step(inputs, target)
            torch.empty(2**20, dtype=torch.uint8)
            self.kept = [torch.empty(2**20, dtype=torch.uint8) for _ in range(3)]

    bare, hoarder = (peak_memory(kind, SMOKE_WORKLOADS[1], CPU) for kind in (Bare, Hoarder))
    # from the second step on, the old three are alive until the new three are there
    assert 6 * 2**20 <= hoarder <= bare + 6 * 2**20


def test_times_are_compared_window_by_window():
    bare, mine = [1.0, 2.0, 3.0, 4.0], [2.0, 6.0, 3.0, 12.0]
    assert compare(mine, bare, interval=10) == Timing(ratio=2.5, spread=1.25, step_seconds=0.45)
    assert compare(mine, bare, interval=20).ratio == pytest.approx((8 / 3 + 15 / 7) / 2)


def test_every_runner_takes_equally_many_steps_in_blocks():
    class Counter:
        def __init__(self):
            self.blocks = []

        def run(self, steps):
            self.blocks.append(steps)

    runners = {name: Counter() for name in "abc"}
    times = interleaved_times(runners, repeats=2, clock=iter(range(1000)).__next__)
    assert all(runner.blocks == [20] + [10] * 20 for runner in runners.values())
    assert times == dict.fromkeys("abc", [1] * 20)


def test_the_loss_of_the_benchmark_cannot_be_learned_away():
    runner = Runner(Bare, SMOKE_WORKLOADS[1], CPU)
    runner.run(300)
    losses = [F.cross_entropy(runner.contender.model(x), y) for x, y in (next(runner._batches) for _ in range(20))]
    assert torch.stack(losses).mean() > 1


def test_a_table_replaces_the_one_of_its_device_and_leaves_the_rest(tmp_path):
    row = Row("cnn/lr-k10", 1.24, 0.01, 1.05, 2.4, 0.03, 0.02, 200, 190, 7)
    where = {"device": "cpu", "device_name": "a processor", "threads": 2, "clock": "wall", "torch": "2.13", "apo": "0"}
    readme = tmp_path / "README.md"
    readme.write_text("before\n\n<!-- overhead cpu: begin -->\nold\n<!-- overhead cpu: end -->\n\nafter\n")
    write_markdown(readme, [row], where)
    text = readme.read_text()
    assert text.startswith("before\n\n<!--") and text.endswith("-->\n\nafter\n") and "old" not in text
    assert "a processor, 2 threads" in text and "| `cnn/lr-k10` | 1.240x |" in text
    write_markdown(readme, [row], where)
    assert readme.read_text() == text
    assert "1.240x" in text_table([row])


def test_cases_that_are_measured_anew_take_the_place_of_earlier_ones(tmp_path):
    first, second, third = (Row(name, 1.2, 0.1, 1.0, 2.0, 0.03, 0.02, 200, 190, 7) for name in "abc")
    where = {"device": "cpu", "device_name": "a processor", "threads": 2, "clock": "wall", "torch": "2.13", "apo": "0"}
    file = tmp_path / "results.json"
    assert updated(read_json(file, where), [second]) == [second]
    write_json(file, [first, second], where)
    repeated = replace(second, ratio=1.5)
    assert updated(read_json(file, where), [third, repeated]) == [first, repeated, third]
    with pytest.raises(ValueError, match="threads 2"):
        read_json(file, where | {"threads": 4})


def test_a_file_of_another_machine_is_refused_before_anything_is_measured(tmp_path):
    file = tmp_path / "results.json"
    where = {"device": "cpu", "device_name": "another", "threads": 2, "clock": "wall", "torch": "2.13", "apo": "0"}
    write_json(file, [Row("mlp/lr-k10", 1.2, 0.1, 1.0, 2.0, 0.03, 0.02, 200, 190, 7)], where)
    before = file.read_text()
    run = overhead("--smoke", "--update", "--json", file, "--cases", "mlp/lr-k10")
    assert run.returncode != 0 and "device_name another" in run.stderr and "name another file" in run.stderr
    assert file.read_text() == before
