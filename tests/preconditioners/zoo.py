"""Small models with every kind of layer, and a batch for each."""

from __future__ import annotations

import torch
from torch import Tensor, nn


def mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3, bias=False), nn.LayerNorm(3))


class Cnn(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(2, 4, 3, padding=1)
        self.norm = nn.BatchNorm2d(4)
        self.grouped = nn.Conv2d(4, 6, (3, 2), groups=2)
        self.pointwise = nn.Conv2d(6, 4, 1)
        self.up = nn.ConvTranspose2d(4, 6, 2, groups=2)
        self.down = nn.ConvTranspose2d(6, 2, 2, bias=False)
        self.group_norm = nn.GroupNorm(1, 2)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(self.grouped(self.norm(self.conv(x))))
        return self.group_norm(self.down(self.up(self.pointwise(x)))).flatten(1)


class OtherConvolutions(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.one = nn.Conv1d(2, 3, 3)
        self.back = nn.ConvTranspose1d(3, 2, 3)
        self.three = nn.Conv3d(1, 2, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.three(self.back(torch.tanh(self.one(x))).reshape(-1, 1, 2, 3, 2)).flatten(1)


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(3, 4, num_layers=2, bidirectional=True, proj_size=2, batch_first=True)
        self.gru = nn.GRU(4, 3, batch_first=True)
        self.plain = nn.RNN(3, 2, bias=False, batch_first=True)
        self.cell = nn.LSTMCell(2, 3)

    def forward(self, x: Tensor) -> Tensor:
        x, _ = self.plain(self.gru(self.lstm(x)[0])[0])
        return self.cell(x[:, -1])[0]


class TiedLanguageModel(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(7, 4)
        self.bag = nn.EmbeddingBag(7, 4)
        self.head = nn.Linear(4, 7)
        self.head.weight = self.embedding.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.embedding(x).mean(1) + self.bag(x))


class LoneParameters(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.temperature = nn.Parameter(torch.tensor(0.5))
        self.token = nn.Parameter(torch.randn(1, 1, 3))
        self.positions = nn.Parameter(torch.randn(1, 4, 3))
        self.cube = nn.Parameter(torch.randn(2, 3, 2))
        self.bilinear = nn.Bilinear(3, 3, 2)
        self.heads = nn.ParameterList([nn.Parameter(torch.randn(3, 2)) for _ in range(2)])
        self.wide_norm = nn.LayerNorm((4, 3))

    def forward(self, x: Tensor) -> Tensor:
        y = (self.wide_norm(x + self.positions + self.token) * self.temperature).mean(1)
        heads = sum(y @ head for head in self.heads)
        return self.bilinear(y, y) + heads + torch.einsum("bi,aic->bc", y, self.cube)


class SeparateAttention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(4, 2, kdim=3, vdim=3, add_bias_kv=True, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.attention(x.repeat(1, 1, 2)[..., :4], x, x)[0].flatten(1)


def encoder_layer() -> nn.Module:
    return nn.TransformerEncoderLayer(4, 2, 6, dropout=0.0, batch_first=True)


# Name: how to build it, and how to draw a batch for it.
ZOO = {
    "mlp": (mlp, lambda: torch.randn(6, 4, dtype=torch.float64)),
    "cnn": (Cnn, lambda: torch.randn(3, 2, 5, 5, dtype=torch.float64)),
    "other convolutions": (OtherConvolutions, lambda: torch.randn(3, 2, 6, dtype=torch.float64)),
    "transformer": (encoder_layer, lambda: torch.randn(3, 5, 4, dtype=torch.float64)),
    "separate attention": (SeparateAttention, lambda: torch.randn(3, 5, 3, dtype=torch.float64)),
    "recurrent": (Recurrent, lambda: torch.randn(3, 5, 3, dtype=torch.float64)),
    "tied language model": (TiedLanguageModel, lambda: torch.randint(7, (5, 3))),
    "lone parameters": (LoneParameters, lambda: torch.randn(5, 4, 3, dtype=torch.float64)),
}


def build(name: str) -> tuple[nn.Module, Tensor]:
    """Returns a model of the zoo in float64 and a batch."""
    make, draw = ZOO[name]
    return make().double(), draw()


def backward(model: nn.Module, batch: Tensor) -> None:
    """Fills the gradients with those of a loss that is not symmetric in anything."""
    output = model(batch)
    weights = torch.linspace(0.5, 1.5, output.numel(), dtype=output.dtype).reshape(output.shape)
    model.zero_grad()
    ((output - 0.3).square() * weights).mean().backward()
