"""A small GPT that predicts the next tokens of short contexts."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from edgegossip.contract.ranges import check_range


def gpt(
    num_tokens: int,
    context: int,
    *,
    width: int = 128,
    num_layers: int = 5,
    num_heads: int = 4,
) -> nn.Module:
    """Build a GPT from tokens, int64 [batch, length], to logits [batch, length, num_tokens].

    The defaults have about a million parameters. There is no dropout, and input and output
    embeddings are separate. Samples may be shorter than the context.

    Args:
        num_tokens: Number of different tokens, e.g. 256 for bytes.
        context: Maximum length of a sample, in tokens.
        width: Size of an embedding, a multiple of `num_heads`.
        num_layers: Number of blocks, each of attention and dense layers.
        num_heads: Heads of each attention.

    Raises:
        ValueError: If a number is below 1, or `width` is not a multiple of `num_heads`.

    References:
        Radford et al., "Language Models are Unsupervised Multitask Learners", 2019 (GPT-2):
        normalization before each part, and the initial weights.

    >>> model = gpt(256, context=128)
    >>> sum(parameter.numel() for parameter in model.parameters())
    1073536
    """
    sizes = {"num_tokens": num_tokens, "context": context, "width": width}
    for name, size in {**sizes, "num_layers": num_layers, "num_heads": num_heads}.items():
        check_range(name, size, "at least 1")
    if width % num_heads:
        raise ValueError(
            f"width {width} is not a multiple of num_heads {num_heads}; each head takes an "
            "equal part of it"
        )
    return _GPT(num_tokens, context, width, num_layers, num_heads)


class _GPT(nn.Module):
    def __init__(
        self, num_tokens: int, context: int, width: int, num_layers: int, num_heads: int
    ) -> None:
        super().__init__()
        self.context = context
        self.tokens = nn.Embedding(num_tokens, width)
        self.places = nn.Embedding(context, width)
        self.blocks = nn.Sequential(*(_Block(width, num_heads) for _ in range(num_layers)))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, num_tokens, bias=False)
        for name, parameter in self.named_parameters():
            if name.endswith("weight") and parameter.ndim == 2:
                # Two sums per block go into one stream, whose variance this keeps.
                is_added = name.endswith(("projection.weight", "narrow.weight"))
                scale = 1 / math.sqrt(2 * num_layers) if is_added else 1.0
                nn.init.normal_(parameter, std=0.02 * scale)
            elif name.endswith("bias"):
                nn.init.zeros_(parameter)

    def forward(self, ids: Tensor) -> Tensor:
        length = ids.shape[1]
        if length > self.context:
            raise ValueError(
                f"got {length} tokens, more than the context of {self.context}; cut the text "
                "into shorter samples"
            )
        x = self.tokens(ids) + self.places(torch.arange(length, device=ids.device))
        logits: Tensor = self.head(self.norm(self.blocks(x)))
        return logits


class _Block(nn.Module):
    """Attention to earlier tokens and dense layers, both with residual connections."""

    def __init__(self, width: int, num_heads: int) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.first_norm = nn.LayerNorm(width)
        self.attention = nn.Linear(width, 3 * width)
        self.projection = nn.Linear(width, width)
        self.second_norm = nn.LayerNorm(width)
        self.wide = nn.Linear(width, 4 * width)
        self.narrow = nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self._attend(self.first_norm(x))
        hidden: Tensor = self.narrow(F.gelu(self.wide(self.second_norm(x))))
        return x + hidden

    def _attend(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        heads = self.attention(x).view(batch, length, 3, self.num_heads, -1)
        query, key, value = heads.permute(2, 0, 3, 1, 4)  # each [batch, heads, length, size]
        found = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        mixed: Tensor = self.projection(found.transpose(1, 2).reshape(batch, length, width))
        return mixed
