"""Policy gradients: their loss can fall without end while the policy gets no better."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from tests.loops.loop import TRAINING, Run, assert_not_silently_lost
from torch import nn

import apo

LENGTH = 6


def policy_loss(logits, move, gain):
    return (F.cross_entropy(logits, move, reduction="none") * gain).mean()


def policy():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(LENGTH, 32), nn.Tanh(), nn.Linear(32, 3))


def played(model, episodes=32):
    """Walk along a corridor: left, right or stay; the right end is worth 1, every move costs 0.02."""
    place = torch.zeros(episodes, dtype=torch.long)
    done = torch.zeros(episodes, dtype=torch.bool)
    seen, moves, rewards, alive = [], [], [], []
    for _ in range(12):
        state = F.one_hot(place, LENGTH).float()
        with torch.no_grad():
            move = torch.distributions.Categorical(logits=model(state)).sample()
        seen.append(state)
        moves.append(move)
        alive.append(~done)
        place = (place + move - 1).clamp(0, LENGTH - 1)
        arrived = (place == LENGTH - 1) & ~done
        rewards.append(arrived.float() - 0.02 * (~done).float())
        done = done | arrived
    rewards = torch.stack(rewards)
    returns = rewards.flip(0).cumsum(0).flip(0)
    kept = torch.stack(alive)
    return torch.stack(seen)[kept], torch.stack(moves)[kept], returns[kept], float(rewards.sum(0).mean())


def reward_missed(model):
    torch.manual_seed(3)
    return 1 - played(model, episodes=500)[3]


def reinforce_loop(lr, attach):
    model = policy()
    criterion = apo.criterion(policy_loss)
    optimizer = torch.optim.Adam(model.parameters(), lr=lr)
    tuner, start = attach(optimizer, model, criterion, discrepancy=apo.CategoricalKL()), reward_missed(model)
    for _ in range(100):
        state, move, returns, _ = played(model)
        gain = (returns - returns.mean()) / (returns.std() + 1e-6)
        optimizer.zero_grad()
        criterion(model(state), move, gain).backward()
        optimizer.step()
    return Run(start, reward_missed(model), tuner)


@pytest.mark.parametrize("initial", [1e-6, 1e-2, 1.0])
def test_reinforce_in_a_corridor_is_not_silently_lost(initial):
    assert_not_silently_lost(reinforce_loop, [1e-2, 3e-2], initial, short=0.15, about=TRAINING)


def balanced(model, episodes=16, limit=100):
    """Balance poles with a policy: Gymnasium's CartPole, written out; an episode is worth the steps that it lasts."""
    state = 0.1 * torch.rand(episodes, 4) - 0.05
    alive = torch.ones(episodes, dtype=torch.bool)
    seen, moves, lives = [], [], []
    for _ in range(limit):
        with torch.no_grad():
            move = torch.distributions.Categorical(logits=model(state)).sample()
        seen.append(state)
        moves.append(move)
        lives.append(alive)
        _, speed, angle, spin = state.unbind(1)
        force, sine, cosine = 20.0 * move - 10.0, angle.sin(), angle.cos()
        pull = (force + 0.05 * spin.square() * sine) / 1.1
        spin_change = (9.8 * sine - cosine * pull) / (0.5 * (4 / 3 - 0.1 * cosine.square() / 1.1))
        speed_change = pull - 0.05 * spin_change * cosine / 1.1
        change = torch.stack([speed, speed_change, spin, spin_change], dim=1)
        state = state + 0.02 * change
        alive = alive & (state[:, 0].abs() < 2.4) & (state[:, 2].abs() < 0.21)
        if not alive.any():
            break
    lives = torch.stack(lives)
    returns, total = torch.zeros(lives.shape), torch.zeros(episodes)
    for index in reversed(range(len(lives))):
        total = lives[index] * (1 + 0.99 * total)
        returns[index] = total
    return torch.stack(seen)[lives], torch.stack(moves)[lives], returns[lives], float(lives.sum(0).float().mean())


def cartpole_loop(lr, attach):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 32), nn.ReLU(), nn.Linear(32, 2))
    criterion = apo.criterion(policy_loss)
    optimizer = torch.optim.Adam(model.parameters(), lr=lr)
    tuner = attach(optimizer, model, criterion, discrepancy=apo.CategoricalKL())
    start, missed = 1 - balanced(model)[3] / 100, []
    for _ in range(60):
        state, move, returns, length = balanced(model)
        missed.append(1 - length / 100)
        gain = (returns - returns.mean()) / (returns.std() + 1e-6)
        optimizer.zero_grad()
        criterion(model(state), move, gain).backward()
        optimizer.step()
    return Run(start, sum(missed[-10:]) / 10, tuner)


@pytest.mark.slow
@pytest.mark.parametrize("initial", [1e-6, 1e-3, 1e-1])
def test_reinforce_that_balances_a_pole_is_not_silently_lost(initial):
    assert_not_silently_lost(cartpole_loop, [1e-2, 3e-2], initial, short=0.25, about=TRAINING)


def bandit_loop(lr, attach):
    torch.manual_seed(0)
    model = nn.Linear(4, 4)
    criterion = apo.criterion(policy_loss)
    optimizer = torch.optim.SGD(model.parameters(), lr=lr, momentum=0.9)
    tuner = attach(optimizer, model, criterion, discrepancy=apo.CategoricalKL())
    contexts = torch.eye(4)

    def missed():
        with torch.no_grad():
            return 1 - float(F.softmax(model(contexts), dim=1).diagonal().mean())

    start = missed()
    for _ in range(200):
        which = torch.randint(4, (32,))
        with torch.no_grad():
            move = torch.distributions.Categorical(logits=model(contexts[which])).sample()
        reward = (move == which).float() + 0.5 * torch.randn(32)
        optimizer.zero_grad()
        criterion(model(contexts[which]), move, reward - reward.mean()).backward()
        optimizer.step()
    return Run(start, missed(), tuner)


@pytest.mark.parametrize("initial", [1e-6, 0.1, 10.0])
def test_a_noisy_bandit_is_not_silently_lost(initial):
    assert_not_silently_lost(bandit_loop, [0.1, 0.3], initial, short=0.15, about=TRAINING)


def ppo_loop(lr, attach):
    class ActorCritic(nn.Module):
        def __init__(self):
            super().__init__()
            self.actor, self.critic = policy(), nn.Linear(LENGTH, 1)

        def forward(self, state):
            return self.actor(state), self.critic(state).squeeze(-1)

    def clipped_loss(output, move, old, gain, returns):
        logits, value = output
        log_probability = -F.cross_entropy(logits, move, reduction="none")
        ratio = (log_probability - old).exp()
        surrogate = torch.minimum(ratio * gain, ratio.clamp(0.8, 1.2) * gain).mean()
        entropy = torch.distributions.Categorical(logits=logits).entropy().mean()
        return -surrogate + 0.5 * F.mse_loss(value, returns) - 0.01 * entropy

    model, criterion = ActorCritic(), apo.criterion(clipped_loss)
    optimizer = torch.optim.Adam(model.parameters(), lr=lr)
    divergence = apo.CategoricalKL(output=0)
    tuner, start = attach(optimizer, model, criterion, discrepancy=divergence), reward_missed(model.actor)
    for _ in range(40):
        state, move, returns, _ = played(model.actor)
        with torch.no_grad():
            logits, value = model(state)
            old = -F.cross_entropy(logits, move, reduction="none")
            gain = returns - value
            gain = (gain - gain.mean()) / (gain.std() + 1e-6)
        for _ in range(4):
            optimizer.zero_grad()
            criterion(model(state), move, old, gain, returns).backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
            optimizer.step()
    return Run(start, reward_missed(model.actor), tuner)


@pytest.mark.parametrize("initial", [1e-6, 1e-2, 1.0])
def test_ppo_is_not_silently_lost(initial):
    assert_not_silently_lost(ppo_loop, [1e-2, 3e-2], initial, short=0.15, about=TRAINING)
