"""Supervised training, as its authors write it."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from tests.loops.loop import Run, assert_learns, batches, digit_batches, digits, mlp, wrong
from torch import nn

import apo


def test_a_digits_classifier_ends_within_three_percent_of_the_best_rate():
    def loop(lr, attach):
        model, criterion = mlp(), nn.CrossEntropyLoss()
        optimizer = torch.optim.SGD(model.parameters(), lr=lr, momentum=0.9)
        tuner, start = attach(optimizer, model, criterion), wrong(model)
        for x, y in digit_batches(200):
            optimizer.zero_grad()
            criterion(model(x), y).backward()
            optimizer.step()
        return Run(start, wrong(model), tuner)

    assert_learns(loop, [0.1, 0.3], short=0.03)


def test_a_convolutional_network_with_batchnorm_and_dropout_ends_near_the_best_rate():
    def loop(lr, attach):
        torch.manual_seed(0)
        model = nn.Sequential(
            nn.Conv2d(1, 8, 3, padding=1),
            nn.BatchNorm2d(8),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Conv2d(8, 16, 3, padding=1),
            nn.ReLU(),
            nn.AdaptiveAvgPool2d(2),
            nn.Flatten(),
            nn.Dropout(0.1),
            nn.Linear(64, 10),
        )
        criterion = nn.CrossEntropyLoss()
        optimizer = torch.optim.Adam(model.parameters(), lr=lr)
        tuner, start = attach(optimizer, model, criterion), wrong(model, flat=False)
        model.train()
        for x, y in digit_batches(120):
            optimizer.zero_grad()
            criterion(model(x.view(-1, 1, 8, 8)), y).backward()
            optimizer.step()
        return Run(start, wrong(model, flat=False), tuner)

    assert_learns(loop, [3e-3, 1e-2], short=0.06)


def test_an_lstm_whose_state_the_loop_carries_from_batch_to_batch_ends_near_the_best_rate():
    class Predictor(nn.Module):
        def __init__(self):
            super().__init__()
            self.lstm, self.head = nn.LSTM(1, 16, batch_first=True), nn.Linear(16, 1)

        def forward(self, x, state=None):
            hidden, state = self.lstm(x, state)
            return self.head(hidden), state

    time = torch.arange(1601) * 0.2
    wave = (torch.sin(time) + 0.5 * torch.sin(2.3 * time + torch.arange(8)[:, None])).unsqueeze(-1)

    def loop(lr, attach):
        torch.manual_seed(0)
        model, criterion = Predictor(), nn.MSELoss()
        optimizer = torch.optim.Adam(model.parameters(), lr=lr)
        tuner, state, losses = attach(optimizer, model, criterion), None, []
        for step in range(100):
            window = wave[:, 16 * step : 16 * step + 17]
            optimizer.zero_grad()
            prediction, state = model(window[:, :-1], state)
            state = tuple(part.detach() for part in state)
            loss = criterion(prediction, window[:, 1:])
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
        return Run(losses[0], sum(losses[-10:]) / 10, tuner)

    assert_learns(loop, [1e-2, 3e-2], short=0.1)


def test_a_transformer_that_sorts_ends_near_the_best_rate():
    class Sorter(nn.Module):
        def __init__(self):
            super().__init__()
            self.embed, self.place = nn.Embedding(8, 32), nn.Parameter(0.02 * torch.randn(6, 32))
            layer = nn.TransformerEncoderLayer(32, 2, 64, dropout=0.0, batch_first=True, norm_first=True)
            self.encoder, self.head = nn.TransformerEncoder(layer, 1, enable_nested_tensor=False), nn.Linear(32, 8)

        def forward(self, tokens):
            return self.head(self.encoder(self.embed(tokens) + self.place))

    tokens = torch.randint(8, (1024, 6), generator=torch.Generator().manual_seed(0))
    ordered = tokens.sort(dim=1).values

    def loop(lr, attach):
        torch.manual_seed(0)
        model, criterion = Sorter(), nn.CrossEntropyLoss()
        optimizer = torch.optim.AdamW(model.parameters(), lr=lr, weight_decay=0.01)
        tuner, losses = attach(optimizer, model, criterion), []
        for x, y in batches(120, tokens, ordered):
            logits = model(x)
            loss = criterion(logits.view(-1, 8), y.view(-1))
            optimizer.zero_grad()
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            losses.append(loss.item())
        return Run(losses[0], sum(losses[-10:]) / 10, tuner)

    assert_learns(loop, [3e-3, 1e-2], short=0.15)


def test_segmentation_with_an_ignored_label_ends_near_the_best_rate():
    inputs = digits()[0].view(-1, 1, 8, 8)
    labels = (inputs[:, 0] > 0.3).long() + (inputs[:, 0] > 0.7).long()
    labels[:, 0] = 255

    def loop(lr, attach):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Conv2d(1, 8, 3, padding=1), nn.ReLU(), nn.Conv2d(8, 3, 1))
        criterion = nn.CrossEntropyLoss(ignore_index=255)
        optimizer = torch.optim.Adam(model.parameters(), lr=lr)
        tuner, losses = attach(optimizer, model, criterion), []
        for x, y in batches(120, inputs, labels):
            optimizer.zero_grad()
            loss = criterion(model(x), y)
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
        return Run(losses[0], sum(losses[-10:]) / 10, tuner)

    assert_learns(loop, [1e-2, 3e-2, 1e-1], short=0.15)


def test_an_autoencoder_ends_near_the_best_rate():
    def loop(lr, attach):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 8), nn.Linear(8, 64))
        criterion = nn.MSELoss()
        optimizer = torch.optim.Adam(model.parameters(), lr=lr)
        tuner, losses = attach(optimizer, model, criterion), []
        for (x,) in batches(200, digits()[0]):
            optimizer.zero_grad()
            loss = criterion(model(x), x)
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
        return Run(losses[0], sum(losses[-10:]) / 10, tuner)

    assert_learns(loop, [3e-3, 1e-2], short=0.15)


def test_a_vae_whose_model_returns_its_loss_ends_near_the_best_rate():
    class Vae(nn.Module):
        def __init__(self):
            super().__init__()
            self.encoder = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 16))
            self.decoder = nn.Sequential(nn.Linear(8, 64), nn.ReLU(), nn.Linear(64, 64))

        def forward(self, x):
            mean, log_variance = self.encoder(x).chunk(2, dim=1)
            logits = self.decoder(mean + torch.randn_like(mean) * (0.5 * log_variance).exp())
            likelihood = F.binary_cross_entropy_with_logits(logits, x, reduction="none").sum(1).mean()
            kl = 0.5 * (mean.square() + log_variance.exp() - 1 - log_variance).sum(1).mean()
            return {"loss": likelihood + kl, "logits": logits}

    def loop(lr, attach):
        torch.manual_seed(0)
        model = Vae()
        optimizer = torch.optim.Adam(model.parameters(), lr=lr)
        tuner, losses = attach(optimizer, model, total_steps=200), []
        for (x,) in batches(200, digits()[0]):
            optimizer.zero_grad()
            loss = model(x)["loss"]
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
        return Run(losses[0], sum(losses[-10:]) / 10, tuner)

    assert_learns(loop, [3e-3, 1e-2], short=0.1)


def test_two_heads_whose_losses_are_added_end_near_the_best_rate():
    class TwoHeads(nn.Module):
        def __init__(self):
            super().__init__()
            self.trunk = nn.Sequential(nn.Linear(64, 50), nn.ReLU())
            self.digit, self.parity = nn.Linear(50, 10), nn.Linear(50, 2)

        def forward(self, x):
            hidden = self.trunk(x)
            return self.digit(hidden), self.parity(hidden)

    def loop(lr, attach):
        torch.manual_seed(0)
        model, criterion = TwoHeads(), nn.CrossEntropyLoss()
        optimizer = torch.optim.SGD(model.parameters(), lr=lr, momentum=0.9)
        tuner, start = attach(optimizer, model, criterion), wrong(lambda x: model(x)[0])
        for x, y in digit_batches(200):
            optimizer.zero_grad()
            digit, parity = model(x)
            loss = criterion(digit, y) + 0.5 * criterion(parity, y % 2)
            loss.backward()
            optimizer.step()
        return Run(start, wrong(lambda x: model(x)[0]), tuner)

    assert_learns(loop, [0.1, 0.3], short=0.03)


def test_the_explicit_door_ends_near_the_best_rate():
    def loop(lr, attach):
        model = mlp()
        optimizer = torch.optim.SGD(model.parameters(), lr=lr, momentum=0.9)
        start, tuner = wrong(model), None
        if attach is apo.attach:
            tuner = apo.APO(optimizer, model, criterion=F.cross_entropy, total_steps=200)
        for x, y in digit_batches(200):
            if tuner is not None:
                tuner.step(x, y)
            else:
                optimizer.zero_grad()
                F.cross_entropy(model(x), y).backward()
                optimizer.step()
        return Run(start, wrong(model), tuner)

    assert_learns(loop, [0.1, 0.3], short=0.05)


def test_the_explicit_door_with_accumulated_micro_batches_ends_near_the_best_rate():
    def loop(lr, attach):
        model = mlp()
        optimizer = torch.optim.AdamW(model.parameters(), lr=lr)
        start, tuner = wrong(model), None
        if attach is apo.attach:
            tuner = apo.APO(optimizer, model, criterion=F.cross_entropy)
        for index, (x, y) in enumerate(digit_batches(400, size=32)):
            if tuner is not None:
                tuner.backward(x, y, weight=0.5)
            else:
                (0.5 * F.cross_entropy(model(x), y)).backward()
            if index % 2:
                nn.utils.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step() if tuner is None else tuner.step()
                optimizer.zero_grad()
        return Run(start, wrong(model), tuner)

    assert_learns(loop, [3e-3, 1e-2], short=0.05)
