"""The tail is the whole displacement that the current gradient causes, found here by letting torch's optimizers run on.

Two copies of an optimizer continue from the same state: one takes the gradient, one takes zero, and from then on both
take zeros. What separates them after many steps is what the gradient has caused. Second moments and their bias
corrections are held at the values that the real step left, bias corrections of the first moment at their limit.
"""

import copy
import math

import pytest
import torch

import apo

RATE, DECAY = 0.1, 0.3
FUTURE = 400  # 0.9 ** 400 = 5e-19
LATE = 10**7  # a step count at which bias corrections and momentum schedules have reached their limits


def hold_adam(state, group, gradient, held):
    beta2 = group["betas"][1]
    state["step"] = torch.tensor(float(LATE))
    state["exp_avg_sq"] = (held["second"] - (1 - beta2) * gradient**2) / beta2
    if "mu_product" in state:  # NAdam's
        state["mu_product"] = torch.zeros(())
    if "max_exp_avg_sq" in state:
        state["max_exp_avg_sq"] = held["second"].clone()


def hold_rmsprop(state, group, gradient, held):
    alpha = group["alpha"]
    state["square_avg"] = (held["second"] - (1 - alpha) * gradient**2) / alpha
    if "grad_avg" in state:
        state["grad_avg"] = (held["mean"] - (1 - alpha) * gradient) / alpha


def hold_adamax(state, group, gradient, held):
    state["step"] = torch.tensor(float(LATE))
    state["exp_inf"] = held["norm"] / group["betas"][1]


def hold_nothing(state, group, gradient, held):
    """SGD has no second moments."""


def moments(state, group):
    """Reads the second moments, bias corrected, that the real step has left."""
    if "exp_avg_sq" in state and "amsgrad" not in group and "momentum_decay" not in group:  # RAdam's
        return {"second": (radam_divisor(state, group) - group["eps"]) ** 2}
    if "exp_avg_sq" in state:
        second = state.get("max_exp_avg_sq", state["exp_avg_sq"])
        return {"second": second / (1 - group["betas"][1] ** float(state["step"]))}
    if "square_avg" in state:
        return {"second": state["square_avg"].clone(), "mean": state.get("grad_avg")}
    return {"norm": state["exp_inf"].clone()} if "exp_inf" in state else {}


def radam_divisor(state, group):
    """Returns what RAdam divides the mean gradient by: its paper's algorithm 2, with torch's place of eps."""
    beta, step = group["betas"][1], float(state["step"])
    longest = 2 / (1 - beta) - 1
    length = longest - 2 * step * beta**step / (1 - beta**step)
    if length <= 5:
        return torch.ones_like(state["exp_avg_sq"])
    squared = (length - 4) * (length - 2) * longest / ((longest - 4) * (longest - 2) * length)
    return (state["exp_avg_sq"].sqrt() + group["eps"]) / ((1 - beta**step) * squared) ** 0.5


CASES = {
    "sgd": ("SGD", {}, hold_nothing),
    "sgd-momentum": ("SGD", {"momentum": 0.9}, hold_nothing),
    "sgd-dampening": ("SGD", {"momentum": 0.9, "dampening": 0.4}, hold_nothing),
    "sgd-nesterov": ("SGD", {"momentum": 0.9, "nesterov": True}, hold_nothing),
    "adam": ("Adam", {}, hold_adam),
    "adam-amsgrad": ("Adam", {"amsgrad": True, "betas": (0.9, 0.5)}, hold_adam),
    "adamw": ("AdamW", {"weight_decay": 0.0}, hold_adam),
    "adamw-amsgrad": ("AdamW", {"weight_decay": 0.0, "amsgrad": True, "betas": (0.9, 0.5)}, hold_adam),
    "nadam": ("NAdam", {}, hold_adam),
    "radam": ("RAdam", {}, hold_adam),
    "radam-that-rectifies-soon": ("RAdam", {"betas": (0.9, 0.99)}, hold_adam),
    "rmsprop": ("RMSprop", {}, hold_rmsprop),
    "rmsprop-momentum": ("RMSprop", {"momentum": 0.9}, hold_rmsprop),
    "rmsprop-centered": ("RMSprop", {"momentum": 0.9, "centered": True}, hold_rmsprop),
    "adamax": ("Adamax", {}, hold_adamax),
}


def prepared(case, steps, **options):
    """Returns a parameter with a fresh gradient, and its optimizer after `steps` steps."""
    torch.manual_seed(4)
    name, own, hold = CASES[case]
    weights = torch.nn.Parameter(torch.randn(3, 2, dtype=torch.float64))
    optimizer = getattr(torch.optim, name)([weights], lr=RATE, **(own | options))
    for _ in range(steps):
        weights.grad = torch.randn_like(weights)
        optimizer.step()
    weights.grad = torch.randn_like(weights)
    return weights, optimizer, hold


def displacement_by_the_rule(weights, optimizer, **options):
    rule = apo.LearningRate(optimizer, warm_start=False, **options)
    before = weights.detach().clone()
    rule.before_step()
    with rule.measuring():
        optimizer.step()
    return rule.propose({weights: before}).displacement()[0]


def run_on(weights, optimizer, gradient, hold, held):
    """Returns where a copy ends that takes `gradient` and then zeros, with the second moments held."""
    weights, optimizer = copy.deepcopy((weights, optimizer))
    group = optimizer.param_groups[0]
    for step in range(FUTURE):
        weights.grad = gradient if step == 0 else torch.zeros_like(gradient)
        if step or optimizer.state[weights]:
            hold(optimizer.state[weights], group, weights.grad, held)
        optimizer.step()
    return weights.detach()


@pytest.mark.parametrize(  # RAdam's tail is another one before its sixth step
    ("case", "steps"), [(case, n) for case in CASES for n in ((6, 20) if case.startswith("radam") else (1, 3, 20))]
)
def test_tail_is_what_the_gradient_causes_over_all_future_steps(case, steps):
    weights, optimizer, hold = prepared(case, steps)
    twin, twin_optimizer = copy.deepcopy((weights, optimizer))
    gradient = weights.grad.clone()
    found = displacement_by_the_rule(weights, optimizer, over_relaxation=1.0)
    held = moments(optimizer.state[weights], optimizer.param_groups[0])
    caused = run_on(twin, twin_optimizer, gradient, hold, held)
    caused -= run_on(twin, twin_optimizer, torch.zeros_like(gradient), hold, held)
    torch.testing.assert_close(found, caused, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("case", [case for case in CASES if case.startswith("sgd")])
def test_tail_of_the_very_first_gradient_too(case):
    weights, optimizer, hold = prepared(case, steps=0)
    twin, twin_optimizer = copy.deepcopy((weights, optimizer))
    start, gradient = weights.detach().clone(), weights.grad.clone()
    found = displacement_by_the_rule(weights, optimizer, over_relaxation=1.0)
    # The first buffer is the gradient itself, without dampening; without this gradient nothing would move at all.
    torch.testing.assert_close(found, run_on(twin, twin_optimizer, gradient, hold, {}) - start, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("case", ["adam", "adam-amsgrad", "adamw", "nadam", "rmsprop-momentum", "adamax"])
def test_tail_of_the_first_adaptive_gradient_is_its_sign(case):
    weights, optimizer, _ = prepared(case, steps=0, eps=0.0)
    gradient = weights.grad.clone()
    found = displacement_by_the_rule(weights, optimizer, over_relaxation=1.0)
    # RMSprop has no bias correction, and its momentum comes after the division.
    size = (1 - 0.99) ** -0.5 / (1 - 0.9) if case == "rmsprop-momentum" else 1.0
    torch.testing.assert_close(found, -RATE * size * gradient.sign(), rtol=1e-9, atol=0)


@pytest.mark.parametrize("case", [case for case in CASES if not case.startswith("adamw")])
def test_coupled_decay_is_a_part_of_the_gradient(case):
    weights, optimizer, _ = prepared(case, steps=3)
    twin, twin_optimizer = copy.deepcopy((weights, optimizer))
    optimizer.param_groups[0]["weight_decay"] = DECAY
    twin.grad = weights.grad + DECAY * weights.detach()
    found = displacement_by_the_rule(weights, optimizer)
    torch.testing.assert_close(found, displacement_by_the_rule(twin, twin_optimizer), rtol=1e-12, atol=0)


@pytest.mark.parametrize(("case", "options"), [("adamw", {}), ("nadam", {"decoupled_weight_decay": True})])
def test_decoupled_decay_acts_at_once_and_scales_with_the_rate(case, options):
    weights, optimizer, _ = prepared(case, steps=3, **options)
    twin, twin_optimizer = copy.deepcopy((weights, optimizer))
    twin.grad = weights.grad.clone()
    optimizer.param_groups[0]["weight_decay"] = DECAY
    decay = -RATE * DECAY * weights.detach().clone()
    found = displacement_by_the_rule(weights, optimizer, over_relaxation=1.0)
    plain = displacement_by_the_rule(twin, twin_optimizer, over_relaxation=1.0)
    torch.testing.assert_close(found, plain + decay, rtol=1e-12, atol=1e-15)


def test_second_moments_without_memory_need_no_bias_correction():
    weights, optimizer, _ = prepared("adam", steps=3, betas=(0.9, 0.0), eps=0.0)
    gradient = weights.grad.clone()
    found = displacement_by_the_rule(weights, optimizer, over_relaxation=1.0)
    torch.testing.assert_close(found, -RATE * gradient.sign(), rtol=1e-12, atol=0)


@pytest.mark.parametrize("case", CASES)
def test_over_relaxation_shortens_the_look_ahead(case):
    longer = displacement_by_the_rule(*prepared(case, steps=3)[:2], over_relaxation=1.0)
    shorter = displacement_by_the_rule(*prepared(case, steps=3)[:2], over_relaxation=2.5)
    torch.testing.assert_close(2.5 * shorter, longer, rtol=1e-13, atol=0)


@pytest.mark.parametrize("steps", [0, 3])
def test_tail_of_radam_is_that_of_plain_and_of_rectified_steps_together_until_it_rectifies(steps):
    weights, optimizer, _ = prepared("radam", steps)
    gradient = weights.grad.clone()
    found = displacement_by_the_rule(weights, optimizer, over_relaxation=1.0)
    state, group = optimizer.state[weights], optimizer.param_groups[0]
    beta, eps = group["betas"][1], group["eps"]
    divisor = radam_divisor({"exp_avg_sq": torch.ones((), dtype=torch.float64), "step": 6}, group)
    scale = (1 + eps) / divisor * math.sqrt((1 - beta ** float(state["step"])) / (1 - beta**6))
    expected = -RATE * (gradient + scale * gradient / (state["exp_avg_sq"].sqrt() + eps))
    torch.testing.assert_close(found, expected, rtol=1e-10, atol=0)


def test_radam_with_short_lived_second_moments_takes_plain_gradients_for_ever():
    weights, optimizer, _ = prepared("radam", 20, betas=(0.9, 0.5))
    gradient = weights.grad.clone()
    found = displacement_by_the_rule(weights, optimizer, over_relaxation=1.0)
    torch.testing.assert_close(found, -RATE * gradient, rtol=1e-12, atol=0)


@pytest.mark.parametrize("name", ["SGD", "RMSprop", "Adagrad", "Adadelta"])
def test_the_tail_of_an_optimizer_without_momentum_is_its_step(name):
    def moved(look_ahead):
        torch.manual_seed(1)
        weights = torch.nn.Parameter(torch.randn(3, 2, dtype=torch.float64))
        optimizer = getattr(torch.optim, name)([weights], lr=RATE)
        for _ in range(3):
            weights.grad = torch.randn_like(weights)
            optimizer.step()
        weights.grad = torch.randn_like(weights)
        return displacement_by_the_rule(weights, optimizer, look_ahead=look_ahead)

    torch.testing.assert_close(moved("tail"), moved("step"), rtol=1e-8, atol=1e-12)


def muon(shape, steps, **options):
    if not hasattr(torch.optim, "Muon"):
        pytest.skip("this torch has no Muon")
    torch.manual_seed(2)
    weights = torch.nn.Parameter(torch.randn(shape))
    optimizer = torch.optim.Muon([weights], lr=RATE, **({"weight_decay": 0.0} | options))
    for _ in range(steps):
        weights.grad = torch.randn(shape)
        optimizer.step()
    weights.grad = torch.randn(shape)
    return weights, optimizer


def newton_schulz(matrix, group):
    """Returns Muon's orthogonalisation of a matrix, in the matrix's own precision."""
    a, b, c = group["ns_coefficients"]
    x = (matrix.T if matrix.shape[0] > matrix.shape[1] else matrix) / matrix.norm()
    for _ in range(group["ns_steps"]):
        gram = x @ x.T
        x = a * x + (b * gram + c * gram @ gram) @ x
    return x.T if matrix.shape[0] > matrix.shape[1] else x


@pytest.mark.parametrize("nesterov", [True, False])
@pytest.mark.parametrize("shape", [(4, 6), (6, 4)], ids=str)
def test_tail_of_muon_is_the_orthogonalised_gradient_as_long_as_its_part_in_all_momentum_to_come(shape, nesterov):
    weights, optimizer = muon(shape, 5, nesterov=nesterov)
    group, gradient = optimizer.param_groups[0], weights.grad.double()
    before = optimizer.state[weights]["momentum_buffer"].double().clone()
    found = displacement_by_the_rule(weights, optimizer, over_relaxation=1.0).double()
    momentum = group["momentum"]

    def updates(first):
        """Yields what Muon orthogonalises at this step and at all later ones, which have no gradients."""
        buffer = before.clone()
        for step in range(FUTURE):
            now = first if step == 0 else torch.zeros_like(first)
            buffer = momentum * buffer + (1 - momentum) * now
            yield (1 - momentum) * now + momentum * buffer if nesterov else buffer.clone()

    present = next(updates(gradient))
    caused = sum(one - other for one, other in zip(updates(gradient), updates(torch.zeros_like(gradient)), strict=True))
    length = torch.linalg.norm(caused) / torch.linalg.norm(present)
    expected = -RATE * max(1, shape[0] / shape[1]) ** 0.5 * length * newton_schulz(gradient, group)
    assert torch.linalg.norm(found - expected) <= 0.05 * torch.linalg.norm(expected)  # the iteration is in bfloat16


def test_tail_of_muon_stays_short_where_momentum_is_nearly_of_rank_one():
    """A gradient that differs a little from the one direction of momentum must not be magnified in the others."""
    weights, optimizer = muon((8, 8), 0)
    common = torch.outer(torch.randn(8), torch.randn(8))
    for _ in range(60):
        weights.grad = common + 1e-4 * torch.randn(8, 8)
        optimizer.step()
    weights.grad = common + 0.03 * torch.outer(torch.randn(8), torch.randn(8))
    twin, twin_optimizer = copy.deepcopy((weights, optimizer))
    twin.grad = weights.grad.clone()
    tail = displacement_by_the_rule(weights, optimizer)
    step = displacement_by_the_rule(twin, twin_optimizer, look_ahead="step")
    assert torch.linalg.norm(tail) <= 1.5 * torch.linalg.norm(step)


@pytest.mark.parametrize("adjust", [None, "match_rms_adamw"])
def test_tail_of_muon_under_a_constant_gradient_is_its_step(adjust):
    weights, optimizer = muon((4, 6), 0, adjust_lr_fn=adjust, weight_decay=0.1)
    gradient = weights.grad.clone()
    for _ in range(200):
        optimizer.step()
        weights.grad = gradient.clone()
    twin, twin_optimizer = copy.deepcopy((weights, optimizer))
    twin.grad = gradient.clone()
    tail = displacement_by_the_rule(weights, optimizer)
    step = displacement_by_the_rule(twin, twin_optimizer, look_ahead="step")
    assert torch.linalg.norm(tail - step) <= 0.05 * torch.linalg.norm(step)


def test_tail_of_muon_begins_with_the_first_step():
    """Momentum has no bias correction, but is divided by its own length, so the first step is a whole one."""
    weights, optimizer = muon((4, 6), 0)
    twin, twin_optimizer = copy.deepcopy((weights, optimizer))
    twin.grad = weights.grad.clone()
    tail = displacement_by_the_rule(weights, optimizer)
    step = displacement_by_the_rule(twin, twin_optimizer, look_ahead="step")
    assert torch.linalg.norm(tail - step) <= 0.05 * torch.linalg.norm(step)


class HeavyBall(torch.optim.Optimizer):
    """Somebody else's SGD with momentum, its buffer under a name of its own."""

    def __init__(self, params, lr=0.1, momentum=0.9, weight_decay=0.0):
        super().__init__(params, {"lr": lr, "momentum": momentum, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                velocity = self.state[p].setdefault("velocity", torch.zeros_like(p))
                velocity.mul_(group["momentum"]).add_(p.grad + group["weight_decay"] * p)
                p.sub_(group["lr"] * velocity)


def heavy_ball_tail(gradient, state, group):
    assert set(state) == {"velocity"}
    return -gradient / (1 - group["momentum"])


@pytest.mark.parametrize("decay", [0.0, 0.2])
def test_a_registered_tail_is_used(decay):
    class Mine(HeavyBall):
        """A class for this test alone."""

        def step(self, closure=None):
            super().step(closure)

    class Child(Mine):
        """A subclass without a step method inherits the tail."""

    apo.register_tail(Mine, heavy_ball_tail, coupled_decay=True)
    for kind in (Mine, Child):
        weights = torch.nn.Parameter(torch.randn(3, 2, dtype=torch.float64))
        optimizer = kind([weights], lr=RATE, weight_decay=decay)
        weights.grad = torch.randn_like(weights)
        expected = -10 * RATE * (weights.grad + decay * weights.detach())
        found = displacement_by_the_rule(weights, optimizer, over_relaxation=1.0)
        torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-15)


def test_decay_of_a_registered_optimizer_is_decoupled_unless_said():
    class Mine(HeavyBall):
        def step(self, closure=None):
            super().step(closure)

    apo.register_tail(Mine, heavy_ball_tail)
    weights = torch.nn.Parameter(torch.randn(3, 2, dtype=torch.float64))
    optimizer = Mine([weights], lr=RATE, weight_decay=0.2)
    weights.grad = torch.randn_like(weights)
    expected = -RATE * (10 * weights.grad + 0.2 * weights.detach())
    found = displacement_by_the_rule(weights, optimizer, over_relaxation=1.0)
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-15)


def test_what_cannot_be_registered_is_refused():
    with pytest.raises(TypeError, match=r"kind must be a subclass of torch.optim.Optimizer, got .*: pass the class"):
        apo.register_tail(HeavyBall([torch.nn.Parameter(torch.ones(2))]), heavy_ball_tail)
    with pytest.raises(TypeError, match=r"tail must be a function of \(gradient, state, group\), got float"):
        apo.register_tail(HeavyBall, 10.0)
