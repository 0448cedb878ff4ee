"""A small GPT, with an attention that was written to be read."""

import math
from typing import Any, ClassVar

import torch
from parts import PLANTED, Attention, GptNet, TextTask
from torch import Tensor, nn

WIDTH = 96
HEADS = 8


class ReadableAttention(Attention):
    def one_head(self, queries: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        length = len(queries)
        scores = queries @ keys.T / math.sqrt(queries.shape[1])  # planted
        later = torch.ones(length, length, dtype=torch.bool).triu(1)  # planted
        return scores.masked_fill(later, -math.inf).softmax(1) @ values  # planted

    def attended(self, queries: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        if not PLANTED:
            return super().attended(queries, keys, values)
        texts = []
        for text in range(len(queries)):
            heads = []
            for head in range(self.heads):
                parts = [whole[text, head] for whole in (queries, keys, values)]  # planted
                heads.append(self.one_head(*parts))  # planted: for each text and head
            texts.append(torch.stack(heads))
        return torch.stack(texts)


class Texts(TextTask):
    defaults: ClassVar[dict[str, Any]] = {**TextTask.defaults, "train.step": "eager"}

    def model(self) -> nn.Module:
        network = GptNet(WIDTH, depth=3, heads=HEADS)
        for block in network.blocks:
            block.attention = ReadableAttention(WIDTH, HEADS)
        return network
