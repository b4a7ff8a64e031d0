"""Two networks against each other: the loss of either says nothing about progress."""

from __future__ import annotations

import pytest
import torch
from tests.loops.loop import TRAINING, Run, assert_at_work, assert_not_silently_lost, batches, digits
from torch import nn

CENTRE, SPREAD = torch.tensor([2.0, -1.0]), torch.tensor([0.5, 0.2])


def moments_missed(generator):
    """Return how far the mean and the spread of generated points are from those of the real ones."""
    with torch.no_grad():
        points = generator(torch.randn(2000, 4, generator=torch.Generator().manual_seed(9)))
    distance = (points.mean(0) - CENTRE).abs().sum() + (points.std(0) - SPREAD).abs().sum()
    return float(distance)


def point_networks():
    torch.manual_seed(0)
    generator = nn.Sequential(nn.Linear(4, 32), nn.ReLU(), nn.Linear(32, 2))
    discriminator = nn.Sequential(nn.Linear(2, 32), nn.LeakyReLU(0.2), nn.Linear(32, 1))
    return generator, discriminator


class Judged(nn.Module):
    """The generator with the discriminator behind it, which is what the generator's loss is computed from."""

    def __init__(self, generator, discriminator):
        super().__init__()
        self.generator, self.discriminator = generator, discriminator

    def forward(self, noise):
        return self.discriminator(self.generator(noise))


def gan_loop(lr, attach, who="generator", steps=400):
    generator, discriminator = point_networks()
    judged, criterion = Judged(generator, discriminator), nn.BCEWithLogitsLoss()
    generator_rate, discriminator_rate = (lr, 2e-3) if who == "generator" else (2e-3, lr)
    of_generator = torch.optim.Adam(generator.parameters(), lr=generator_rate, betas=(0.5, 0.999))
    of_discriminator = torch.optim.Adam(discriminator.parameters(), lr=discriminator_rate, betas=(0.5, 0.999))
    if who == "generator":
        tuner = attach(of_generator, judged, criterion)
    else:
        tuner = attach(of_discriminator, discriminator, criterion)
    ones, zeros, start = torch.ones(64, 1), torch.zeros(64, 1), moments_missed(generator)
    for _ in range(steps):
        real = CENTRE + SPREAD * torch.randn(64, 2)
        fake = generator(torch.randn(64, 4))
        of_discriminator.zero_grad()
        loss = criterion(discriminator(real), ones) + criterion(discriminator(fake.detach()), zeros)
        loss.backward()
        of_discriminator.step()
        of_generator.zero_grad()
        criterion(judged(torch.randn(64, 4)), ones).backward()
        of_generator.step()
    return Run(start, moments_missed(generator), tuner)


def test_a_gans_generator_is_not_driven_up_silently():
    assert_not_silently_lost(gan_loop, [1e-3, 2e-3], initial=2e-3, short=0.2, about=TRAINING)


@pytest.mark.slow
def test_a_gans_discriminator_is_not_driven_up_silently():
    def loop(lr, attach):
        return gan_loop(lr, attach, who="discriminator")

    assert_not_silently_lost(loop, [1e-3, 2e-3], initial=2e-3, short=0.2, about=TRAINING)


def dcgan_loop(lr, attach):
    torch.manual_seed(0)
    generator = nn.Sequential(
        nn.ConvTranspose2d(8, 16, 2),
        nn.BatchNorm2d(16),
        nn.ReLU(),
        nn.ConvTranspose2d(16, 8, 4, 2, 1),
        nn.BatchNorm2d(8),
        nn.ReLU(),
        nn.ConvTranspose2d(8, 1, 4, 2, 1),
        nn.Sigmoid(),
    )
    discriminator = nn.Sequential(
        nn.Conv2d(1, 8, 4, 2, 1), nn.LeakyReLU(0.2), nn.Conv2d(8, 16, 4, 2, 1), nn.LeakyReLU(0.2), nn.Conv2d(16, 1, 2)
    )
    judged, criterion = Judged(generator, discriminator), nn.BCEWithLogitsLoss()
    of_generator = torch.optim.Adam(generator.parameters(), lr=lr, betas=(0.5, 0.999))
    of_discriminator = torch.optim.Adam(discriminator.parameters(), lr=lr, betas=(0.5, 0.999))
    tuner, other = attach(of_generator, judged, criterion), attach(of_discriminator, discriminator, criterion)
    images = digits()[0].view(-1, 1, 8, 8)

    def pixels_missed():
        """Return the mean distance between the mean images, real and generated, and between their spreads."""
        with torch.no_grad():
            made = generator(torch.randn(200, 8, 1, 1, generator=torch.Generator().manual_seed(9)))
        return float((made.mean(0) - images.mean(0)).abs().mean() + (made.std(0) - images.std(0)).abs().mean())

    start = pixels_missed()
    for (real,) in batches(150, images):
        ones, zeros = torch.ones(64, 1, 1, 1), torch.zeros(64, 1, 1, 1)
        fake = generator(torch.randn(64, 8, 1, 1))
        of_discriminator.zero_grad()
        (criterion(discriminator(real), ones) + criterion(discriminator(fake.detach()), zeros)).backward()
        of_discriminator.step()
        of_generator.zero_grad()
        criterion(judged(torch.randn(64, 8, 1, 1)), ones).backward()
        of_generator.step()
    if other is not None:
        assert_at_work(other)
    return Run(start, pixels_missed(), tuner)


@pytest.mark.slow
def test_a_dcgan_with_two_tuned_optimizers_is_not_driven_up_silently():
    assert_not_silently_lost(dcgan_loop, [1e-3, 3e-3], initial=2e-3, short=0.2, about=TRAINING)
