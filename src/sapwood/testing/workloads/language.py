"""A small language model with tied embeddings: one tensor that gets gradients from two places."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from sapwood.errors import ConfigError
from sapwood.testing.workloads.base import Batch, Workload, generator

__all__ = ["transformer"]


def transformer(
    *,
    layers: int = 2,
    dim: int = 64,
    heads: int = 4,
    vocab: int = 128,
    seq: int = 32,
    tied: bool = True,
    batch_size: int = 8,
    seed: int = 0,
) -> Workload:
    """A decoder like GPT's; with ``tied`` the output layer is the token embedding.

    The text follows a hidden table of successors, with some noise.
    """
    if dim % heads:
        raise ConfigError(f"transformer: dim={dim} is not a multiple of heads={heads}")

    def build() -> nn.Module:
        return _Gpt(layers, dim, heads, vocab, seq, tied)

    data = _Successors(vocab=vocab, seq=seq)
    return Workload(name="transformer", build=build, data=data, batch_size=batch_size, seed=seed)


@dataclass(frozen=True, kw_only=True)
class _Successors:
    vocab: int
    seq: int
    noise: float = 0.1

    def __call__(self, task: int, number: int, size: int) -> Batch:
        table = torch.randperm(self.vocab, generator=generator(task))
        chance = generator(number)
        text = torch.randint(self.vocab, (size, self.seq + 1), generator=chance)
        follows = torch.rand((size, self.seq + 1), generator=chance) >= self.noise
        for place in range(1, self.seq + 1):
            expected = table[text[:, place - 1]]
            text[:, place] = torch.where(follows[:, place], expected, text[:, place])
        return text[:, :-1].contiguous(), text[:, 1:].contiguous()


class _Gpt(nn.Module):
    def __init__(self, layers: int, dim: int, heads: int, vocab: int, seq: int, tied: bool) -> None:
        super().__init__()
        self.tokens = nn.Embedding(vocab, dim)
        self.places = nn.Embedding(seq, dim)
        self.blocks = nn.Sequential(*(_Block(dim, heads) for _ in range(layers)))
        self.norm = nn.LayerNorm(dim)
        self.head = nn.Linear(dim, vocab, bias=False)
        nn.init.normal_(self.tokens.weight, std=0.02)
        nn.init.normal_(self.places.weight, std=0.02)
        if tied:
            self.head.weight = self.tokens.weight

    def forward(self, text: Tensor) -> Tensor:
        x = self.tokens(text) + self.places.weight[: text.shape[1]]
        result: Tensor = self.head(self.norm(self.blocks(x)))
        return result


class _Block(nn.Module):
    def __init__(self, dim: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(dim), nn.LayerNorm(dim)
        self.attend, self.mix = nn.Linear(dim, 3 * dim), nn.Linear(dim, dim)
        self.widen, self.narrow = nn.Linear(dim, 4 * dim), nn.Linear(4 * dim, dim)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self._attention(self.norm1(x))
        result: Tensor = x + self.narrow(F.gelu(self.widen(self.norm2(x))))
        return result

    def _attention(self, x: Tensor) -> Tensor:
        size, length, dim = x.shape
        split = self.attend(x).view(size, length, 3, self.heads, dim // self.heads)
        query, key, value = split.permute(2, 0, 3, 1, 4)
        seen = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        result: Tensor = self.mix(seen.transpose(1, 2).reshape(size, length, dim))
        return result
