"""A small GPT over bytes. The same numbers come out of it every time: nothing in it draws at random after the start."""

from __future__ import annotations

import torch
from torch import Tensor, nn

VOCABULARY = 256  # a token is a byte
LENGTH = 128  # tokens that the model sees at once
WIDTH, HEADS, LAYERS = 64, 4, 2
TIED = "head.weight"  # in the state_dict: the same tensor as token.weight


class GPT(nn.Module):
    """Predicts each byte from those before it."""

    def __init__(self) -> None:
        super().__init__()
        self.token, self.place = nn.Embedding(VOCABULARY, WIDTH), nn.Embedding(LENGTH, WIDTH)
        self.blocks = nn.ModuleList(
            nn.TransformerEncoderLayer(
                WIDTH, HEADS, 4 * WIDTH, dropout=0.0, activation="gelu", batch_first=True, norm_first=True
            )
            for _ in range(LAYERS)
        )
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, VOCABULARY, bias=False)
        for embedding in (self.token, self.place):
            nn.init.normal_(embedding.weight, std=0.02)
        self.head.weight = self.token.weight  # tied: one tensor under two names

    def forward(self, tokens: Tensor) -> Tensor:
        """Logits (batch, LENGTH, VOCABULARY) for tokens (batch, LENGTH)."""
        hidden = torch.ones(LENGTH, LENGTH, dtype=torch.bool).triu(1)  # no place sees those after it
        x = self.token(tokens) + self.place.weight
        for block in self.blocks:
            x = block(x, src_mask=hidden, is_causal=True)
        logits: Tensor = self.head(self.norm(x))
        return logits
