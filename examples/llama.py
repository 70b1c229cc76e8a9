"""A small Llama: RMSNorm, grouped-query attention with rotary embedding, SwiGLU. Operation names are module names."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn


@dataclass(frozen=True)
class Config:
    layers: int = 4
    width: int = 256
    hidden: int = 688
    """width of the MLP"""
    heads: int = 8
    kv_heads: int = 2
    vocabulary: int = 2048
    rope_theta: float = 500_000.0

    @property
    def head_width(self) -> int:
        return self.width // self.heads

    def flops_per_step(self, batch: int, sequence: int) -> float:
        """Forward and backward FLOPs of one step without recompute: 6 per token and matrix parameter, plus the two
        score matrices of attention (backward twice the forward), of which causality needs half."""
        attention = self.width * self.width * 2 + self.width * self.kv_heads * self.head_width * 2
        matrices = self.layers * (attention + 3 * self.width * self.hidden) + self.width * self.vocabulary
        scores = self.layers * 2 * self.width * sequence / 2
        return 6.0 * batch * sequence * (matrices + scores)


class RMSNorm(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x, self.weight.shape, self.weight, eps=1e-5)


class RotaryEmbedding(nn.Module):
    """Turns pairs of channels by an angle that grows with the position."""

    cosine: Tensor
    sine: Tensor

    def __init__(self, head_width: int, theta: float, longest: int = 4096) -> None:
        super().__init__()
        frequencies = theta ** (-torch.arange(0, head_width, 2).float() / head_width)
        angles = torch.outer(torch.arange(longest).float(), frequencies).repeat(1, 2)
        self.register_buffer("cosine", angles.cos(), persistent=False)
        self.register_buffer("sine", angles.sin(), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        cosine, sine = (table[: x.shape[-2]].to(x.dtype) for table in (self.cosine, self.sine))
        first, second = x.chunk(2, dim=-1)
        return x * cosine + torch.cat((-second, first), dim=-1) * sine


class Sdpa(nn.Module):
    """Causal scaled dot-product attention; queries share keys and values in groups."""

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)


class Attention(nn.Module):
    def __init__(self, config: Config) -> None:
        super().__init__()
        self.head_width = config.head_width
        kv_width = config.kv_heads * config.head_width
        self.q_proj = nn.Linear(config.width, config.width, bias=False)
        self.k_proj = nn.Linear(config.width, kv_width, bias=False)
        self.v_proj = nn.Linear(config.width, kv_width, bias=False)
        self.rope = RotaryEmbedding(config.head_width, config.rope_theta)
        self.sdpa = Sdpa()
        self.o_proj = nn.Linear(config.width, config.width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (self.split_heads(proj(x)) for proj in (self.q_proj, self.k_proj, self.v_proj))
        return self.o_proj(self.sdpa(self.rope(q), self.rope(k), v).transpose(1, 2).flatten(2))

    def split_heads(self, x: Tensor) -> Tensor:
        return x.unflatten(-1, (-1, self.head_width)).transpose(1, 2)


class Mlp(nn.Module):
    def __init__(self, config: Config) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(config.width, config.hidden, bias=False)
        self.act = nn.SiLU()
        self.up_proj = nn.Linear(config.width, config.hidden, bias=False)
        self.down_proj = nn.Linear(config.hidden, config.width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(self.act(self.gate_proj(x)) * self.up_proj(x))


class Block(nn.Module):
    def __init__(self, config: Config) -> None:
        super().__init__()
        self.attn_norm = RMSNorm(config.width)
        self.attn = Attention(config)
        self.mlp_norm = RMSNorm(config.width)
        self.mlp = Mlp(config)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attn(self.attn_norm(x))
        return x + self.mlp(self.mlp_norm(x))


class Llama(nn.Module):
    def __init__(self, config: Config) -> None:
        super().__init__()
        self.config = config
        self.embed = nn.Embedding(config.vocabulary, config.width)
        self.layers = nn.ModuleList(Block(config) for _ in range(config.layers))
        self.norm = RMSNorm(config.width)
        self.lm_head = nn.Linear(config.width, config.vocabulary, bias=False)

    def keep(self, first: int, end: int) -> Llama:
        """Of the model only layers `first` to `end` (excluded), with what stands before the first and behind the last:
        a stage of a pipeline. Every layer keeps its name."""
        for i in range(len(self.layers)):
            if not first <= i < end:
                self.layers[i] = None
        if first > 0:
            self.embed = None
        if end < len(self.layers):
            self.norm = self.lm_head = None
        return self

    def forward(self, x: Tensor) -> Tensor:
        if self.embed is not None:
            x = self.embed(x)
        for layer in self.layers:
            if layer is not None:
                x = layer(x)
        return x if self.lm_head is None else self.lm_head(self.norm(x))
