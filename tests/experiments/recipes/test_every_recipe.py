"""Every recipe is complete, its settings are accepted by its methods, and it runs at its smallest scale."""

import math

import pytest
import torch
from tests.experiments.methods.conformance import complete

from apo_experiments.data.registry import DATASETS
from apo_experiments.errors import UserError
from apo_experiments.figures import FIGURES
from apo_experiments.methods import METHODS
from apo_experiments.methods.schedules import schedule_factor
from apo_experiments.problem import Budget
from apo_experiments.recipe import SCALES
from apo_experiments.recipes import FAMILIES, RECIPES, plan
from apo_experiments.results import differences_of_scale, own_method
from apo_experiments.train import train

NAMES = sorted(RECIPES)
TABLE_4 = [name for name in NAMES if RECIPES[name].paper == "Table 4"]
#: The optimizers of Table 4.
BASES = ["SGD", "SGDm", "RMSprop", "Adam"]
#: The recipes with its entries, some of which are in no table.
LIKE_TABLE_4 = [name for name in NAMES if f"{BASES[0]}-step" in {entry.label for entry in RECIPES[name].entries}]

#: What issue and paper ask for, by family.
OF_THE_PAPER = [
    "figure-1",
    "rosenbrock",
    "ill-conditioned",
    "uci-slice",
    "uci-protein",
    "uci-parkinsons",
    "mnist-autoencoder",
    *(f"cifar10-{model}" for model in ("lenet", "alexnet", "vgg16", "resnet18", "resnet32")),
    *(f"cifar100-{model}" for model in ("alexnet", "vgg16", "resnet18", "resnet32")),
    "svhn-resnet18",
    "translation",
    "low-precision-lenet",
    "low-precision-resnet18",
    "mnist-mlp",
    *(f"cifar10-{model}-rate" for model in ("resnet32", "resnet34", "wrn")),
    "cifar100-wrn-rate",
    "svhn-wrn-rate",
    *(f"ablation-{name}" for name in ("loss-batch", "fsd-batch", "lambdas", "initial-rate")),
    "ablation-interval-rate",
    "ablation-interval-precond",
]


@pytest.mark.parametrize("name", OF_THE_PAPER)
def test_the_paper_is_there(name):
    assert name in RECIPES


@pytest.mark.parametrize("name", NAMES)
def test_a_recipe_is_complete(name):
    recipe = RECIPES[name]
    assert recipe.name == name
    assert set(recipe.scales) == set(SCALES)
    assert recipe.goal in ("min", "max") and recipe.metric
    assert recipe.figure in FIGURES
    assert set(recipe.data) <= set(DATASETS)
    assert (recipe.task is None) == (recipe.compute is not None)
    labels = [entry.label.lower() for entry in recipe.entries]
    assert len(set(labels)) == len(labels) > 0


@pytest.mark.parametrize("name", [name for name in NAMES if RECIPES[name].compute is None])
def test_every_setting_and_every_point_of_the_grid_is_accepted(name):
    recipe = RECIPES[name]
    for entry in recipe.entries:
        method = METHODS[entry.method]
        complete(method, entry.hyper)
        for key, values in entry.grid.items():
            for value in values:
                if key in recipe.defaults:
                    continue
                complete(method, {**entry.hyper, key: value})
    for scale in SCALES:
        for entry in recipe.entries:
            complete(METHODS[entry.method], recipe.scales[scale].hyper.get(entry.label, {}))
        assert recipe.scales[scale].options.keys() <= recipe.defaults.keys()
        assert {run.label for run in plan(recipe, scale, seeds=1)} == {entry.label for entry in recipe.entries}


@pytest.mark.parametrize(
    ("name", "varied"),
    [
        ("ablation-lambdas", {"wsd_weight", "fsd_weight"}),
        ("ablation-interval-precond", {"warmup_interval", "interval"}),
    ],
)
def test_ablations_of_a_preconditioner_have_the_settings_of_table_2(name, varied):
    usual = next(entry.hyper for entry in RECIPES["cifar10-alexnet"].entries if entry.label == "APO-Precond")
    for entry in RECIPES[name].entries:
        assert {key: value for key, value in usual.items() if entry.hyper.get(key) != value}.keys() <= varied


#: Multi30k is not the paper's data, so its BLEU has nothing to be held against.
IN_TABLES = [name for name in NAMES if RECIPES[name].paper.startswith("Table") and name != "translation"]


@pytest.mark.parametrize("name", IN_TABLES)
def test_the_tables_of_the_paper_come_with_their_figures(name):
    values = [entry.paper for entry in RECIPES[name].entries if entry.paper is not None]
    assert values and all(20 < value < 100 for value in values)


def test_table_2_of_the_paper():
    """Test accuracies of the first row, as printed."""
    paper = {entry.label: entry.paper for entry in RECIPES["cifar10-lenet"].entries}
    assert [paper[label] for label in ("SGDm", "Adam", "KFAC", "APO-Precond")] == [75.73, 73.41, 76.63, 77.42]


@pytest.mark.parametrize("name", TABLE_4)
def test_table_4_has_the_papers_own_method_and_its_value_beside_that(name):
    entries = {entry.label: entry for entry in RECIPES[name].entries}
    for base in BASES:
        assert entries[f"{base}-APO-paper"].hyper["preset"] == "paper" and entries[f"{base}-APO-paper"].paper
        assert entries[f"{base}-APO"].paper is None
    runs = {run.label: own_method(run) for run in plan(RECIPES[name], "paper", seeds=1)}
    assert {label for label, text in runs.items() if text} == {f"{base}-APO" for base in BASES}


@pytest.mark.parametrize(
    "name, difference",
    [
        ("ablation-loss-batch", "model lenet (paper: resnet32)"),
        ("mnist-mlp", "width 0.2 (paper: 1)"),
        ("cifar10-vgg16", "width 0.25 (paper: 1)"),
        ("translation", "dimension 128 (paper: 512)"),
    ],
)
def test_a_smaller_network_at_scale_cpu_is_said(name, difference):
    assert difference in differences_of_scale(RECIPES[name], "cpu")
    assert differences_of_scale(RECIPES[name], "paper") == ""


def test_smoke_runs_need_no_data():
    for recipe in RECIPES.values():
        for run in plan(recipe, "smoke", seeds=1):
            assert run.options.get("data", "generated") == "generated"


def test_digits_are_neither_mirrored_nor_cropped():
    assert {name: RECIPES[name].defaults["augment"] for name in NAMES if "svhn" in RECIPES[name].data} == {
        "svhn-resnet18": False,
        "svhn-wrn-rate": False,
    }


@pytest.mark.parametrize("name", ["translation", "translation-iwslt14"])
@pytest.mark.parametrize("scale", SCALES)
def test_the_inverse_square_root_schedule_rises_alike_for_sgdm_and_adamw(name, scale):
    runs = plan(RECIPES[name], scale, ["sgdm", "adamw"], seeds=1, overrides={"schedule": "inverse-sqrt"})
    sgdm, adamw = (schedule_factor(run.hyper, Budget(10_000, 100)) for run in runs)
    assert [sgdm(step) for step in (0, 150, 3999, 8000)] == [adamw(step) for step in (0, 150, 3999, 8000)]
    fixed = plan(RECIPES[name], scale, ["sgdm"], seeds=1, overrides={"schedule": "fixed"})[0].hyper
    assert schedule_factor(fixed, Budget(10_000, 100))(0) == 1


def test_defaults_that_diverged_at_scale_cpu_have_changed():
    """What keeps them from diverging: the runs need data, and KFAC explodes with some roundings only."""
    (sgdm,) = plan(RECIPES["translation"], "cpu", ["sgdm"], seeds=1)
    assert schedule_factor(sgdm.hyper, Budget(486, 81))(0) < 0.01
    (kfac,) = plan(RECIPES["uci-parkinsons"], "cpu", ["kfac"], seeds=1)
    assert kfac.hyper["kl_clip"]
    (of_the_paper,) = plan(RECIPES["uci-parkinsons"], "paper", ["kfac"], seeds=1)
    assert of_the_paper.hyper["kl_clip"] is None


@pytest.mark.parametrize(
    "change, message",
    [
        ({"weight_deca": "0.1"}, "has no setting 'weight_deca': did you mean weight_decay"),
        ({"lr": "fast"}, "lr"),
        ({"epochs": "0"}, "epochs was '0'"),
    ],
)
def test_a_setting_that_makes_no_sense_is_refused_in_one_sentence(change, message):
    with pytest.raises(UserError, match=message):
        plan(RECIPES["uci-protein"], "cpu", overrides=change)


def test_an_unknown_method_is_refused_with_the_known_ones():
    with pytest.raises(UserError, match="has no method 'lion': choose one of SGDm"):
        plan(RECIPES["uci-protein"], "cpu", ["lion"])


def test_the_claim_about_initial_rates_can_fail(tmp_path):
    """With a warm start the initial rate is discarded; the paper's settings keep it."""
    recipe, found = RECIPES["ablation-initial-rate"], {}
    labels = ["lr=1e-06", "lr=1", "paper-lr=1e-06", "paper-lr=1"]
    for config in plan(recipe, "smoke", labels, seeds=1):
        record = train(config, root=tmp_path)
        assert record.summary is not None
        found[config.label] = record.summary["metrics"]["train_loss"]
    assert found["lr=1e-06"] == found["lr=1"] and found["paper-lr=1e-06"] != found["paper-lr=1"]


def labels_to_run(name):
    """Return the entries of a recipe that run at smoke scale; None for all of them.

    Recipes of one family share their entries and differ in network and data: all entries run on the first of a family,
    and a few on each of the others.
    """
    if name in FAMILIES["no-tuning"][1:]:
        return ["SGDm-APO", "AdamW-cosine-0.001"]
    if name in LIKE_TABLE_4[1:]:
        base = BASES[LIKE_TABLE_4.index(name) % len(BASES)]
        return [f"{base}-{way}" for way in ("fixed", "step", "APO-paper", "APO")]
    if name.startswith("cifar100-") and name.replace("cifar100-", "cifar10-") in NAMES:  # a wider last layer
        return ["SGDm", "APO-Precond"]
    if name == "ablation-initial-rate":  # fourteen entries that differ in a number; four run in the test above
        return ["paper-lr=0.001", "lr=0.001"]
    return None


def test_every_optimizer_of_table_4_runs_with_another_network_too():
    labels = {label for name in LIKE_TABLE_4[1:] for label in labels_to_run(name)}
    assert labels == {entry.label for entry in RECIPES[LIKE_TABLE_4[0]].entries}


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_it_runs_at_smoke_scale(name, tmp_path):
    torch.set_num_threads(1)
    recipe = RECIPES[name]
    for config in plan(recipe, "smoke", labels_to_run(name), seeds=1):
        record = train(config, root=tmp_path)
        assert record.summary is not None
        value = record.summary["metrics"][recipe.metric]
        assert record.summary["diverged"] or math.isfinite(value)
        assert record.rows
