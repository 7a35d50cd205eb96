"""Small models of the kinds the graph must know. Each class has ``sample(batch)``."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F


class Block(nn.Module):
    """ResNet's, with one shared activation module, as torchvision has it."""

    def __init__(self, width: int, stride: int = 1, grow: int = 1) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(width, width * grow, 3, stride, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(width * grow)
        self.relu = nn.ReLU(inplace=True)
        self.conv2 = nn.Conv2d(width * grow, width * grow, 3, 1, 1, bias=False)
        self.bn2 = nn.BatchNorm2d(width * grow)
        self.down = None
        if stride > 1 or grow > 1:
            self.down = nn.Sequential(
                nn.Conv2d(width, width * grow, 1, stride, bias=False), nn.BatchNorm2d(width * grow)
            )

    def forward(self, x: Tensor) -> Tensor:
        y = self.relu(self.bn1(self.conv1(x)))
        y = self.bn2(self.conv2(y))
        y += x if self.down is None else self.down(x)
        return self.relu(y)


class ResNet(nn.Module):
    def __init__(self, classes: int = 5) -> None:
        super().__init__()
        self.stem = nn.Sequential(
            nn.Conv2d(3, 8, 3, 1, 1, bias=False), nn.BatchNorm2d(8), nn.ReLU()
        )
        self.blocks = nn.Sequential(Block(8), Block(8), Block(8, 2, 2), Block(16))
        self.pool = nn.AdaptiveAvgPool2d(1)
        self.fc = nn.Linear(16, classes)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc(torch.flatten(self.pool(self.blocks(self.stem(x))), 1))

    @staticmethod
    def sample(batch: int = 2) -> Any:
        return torch.randn(batch, 3, 8, 8)


class Encoder(nn.Module):
    def __init__(self, layers: int = 2) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, 16)
        layer = nn.TransformerEncoderLayer(16, 2, 32, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, layers, enable_nested_tensor=False)
        self.head = nn.Linear(16, 3)

    def forward(self, tokens: Tensor, mask: Tensor | None = None) -> Tensor:
        return self.head(self.encoder(self.embed(tokens), src_key_padding_mask=mask))

    @staticmethod
    def sample(batch: int = 2) -> Any:
        return torch.zeros(batch, 5, dtype=torch.long)


class Attention(nn.Module):
    """q, k and v are siblings: one configuration, one input."""

    def __init__(self, order: str = "qkv", fused: bool = True) -> None:
        super().__init__()
        made = {name: nn.Linear(8, 8) for name in "qkv"}
        for name in order:
            setattr(self, name, made[name])
        self.out = nn.Linear(8, 8)
        self.fused = fused

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.q(x), self.k(x), self.v(x)
        if self.fused:
            return self.out(F.scaled_dot_product_attention(q, k, v)) + x
        return self.out(torch.softmax(q @ k.transpose(-1, -2) / 8**0.5, -1) @ v) + x

    @staticmethod
    def sample(batch: int = 2) -> Any:
        return torch.randn(batch, 4, 8)


class TiedHead(nn.Module):
    def __init__(self, tied: bool = True) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, 8)
        self.body = nn.Linear(8, 8)
        self.head = nn.Linear(8, 11, bias=False)
        if tied:
            self.head.weight = self.embed.weight

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(torch.tanh(self.body(self.embed(tokens))))

    @staticmethod
    def sample(batch: int = 2) -> Any:
        return torch.zeros(batch, 3, dtype=torch.long)


class Expert(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(8, 16)
        self.act = nn.GELU()
        self.down = nn.Linear(16, 8)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.act(self.up(x)))


class Mixture(nn.Module):
    """All experts run on everything: no values are looked at."""

    def __init__(self, experts: int = 8) -> None:
        super().__init__()
        self.router = nn.Linear(8, experts)
        self.experts = nn.ModuleList(Expert() for _ in range(experts))
        self.norm = nn.LayerNorm(8)

    def forward(self, x: Tensor) -> Tensor:
        gates = self.router(x).softmax(-1)
        outs = torch.stack([expert(x) for expert in self.experts], -1)
        return self.norm((outs * gates[:, None]).sum(-1) + x)

    @staticmethod
    def sample(batch: int = 2) -> Any:
        return torch.randn(batch, 8)


class Routed(Mixture):
    """Only the chosen experts run: which, only values tell."""

    def forward(self, x: Tensor) -> Tensor:
        chosen = self.router(x).argmax(-1)
        out = torch.zeros_like(x)
        for n, expert in enumerate(self.experts):
            rows = torch.nonzero(chosen == n).flatten()
            if len(rows):
                out[rows] = expert(x[rows])
        return self.norm(out + x)


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(4, 6, num_layers=2, bidirectional=True, batch_first=True)
        self.head = nn.Linear(12, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.lstm(x)[0][:, -1])

    @staticmethod
    def sample(batch: int = 2) -> Any:
        return torch.randn(batch, 5, 4)


class CellLoop(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.cell = nn.GRUCell(4, 6)
        self.head = nn.Linear(6, 2)

    def forward(self, x: Tensor) -> Tensor:
        state = x.new_zeros(x.shape[0], 6)
        for step in x.unbind(1):
            state = self.cell(step, state)
        return self.head(state)

    @staticmethod
    def sample(batch: int = 2, steps: int = 5) -> Any:
        return torch.randn(batch, steps, 4)


class UNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.down1, self.down2 = nn.Conv2d(1, 4, 3, padding=1), nn.Conv2d(4, 8, 3, padding=1)
        self.middle = nn.Conv2d(8, 8, 3, padding=1)
        self.up = nn.ConvTranspose2d(8, 4, 2, 2)
        self.out = nn.Conv2d(8, 1, 1)

    def forward(self, x: Tensor) -> Tensor:
        one = F.relu(self.down1(x))
        two = F.relu(self.down2(F.max_pool2d(one, 2)))
        up = self.up(F.relu(self.middle(two)))
        return self.out(torch.cat([up, one], 1))

    @staticmethod
    def sample(batch: int = 2) -> Any:
        return torch.randn(batch, 1, 8, 8)


class Unused(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.spare, self.b = nn.Linear(4, 4), nn.Linear(4, 7), nn.Linear(4, 4)
        self.twin1, self.twin2 = nn.Linear(4, 9), nn.Linear(4, 9)
        self.extra = nn.Parameter(torch.zeros(3))

    def forward(self, x: Tensor) -> Tensor:
        return self.b(self.a(x))

    @staticmethod
    def sample(batch: int = 2) -> Any:
        return torch.randn(batch, 4)


class DenseNet(nn.Module):
    def __init__(self, layers: int = 30) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(4 + 2 * n, 2) for n in range(layers))

    def forward(self, x: Tensor) -> Tensor:
        found = [x]
        for layer in self.layers:
            found.append(layer(torch.cat(found, -1)))
        return torch.cat(found, -1)

    @staticmethod
    def sample(batch: int = 2) -> Any:
        return torch.randn(batch, 4)


ALL: list[Any] = [
    ResNet, Encoder, Attention, TiedHead, Mixture, Recurrent, CellLoop, UNet, Unused, DenseNet
]  # fmt: skip
