"""A GPT: a decoder-only transformer language model with learned positions and torch's fused
attention.

Linear layers and norms have no bias, which would add parameters and kernels, but no quality.
"""

from __future__ import annotations

import math

from torch import Tensor, nn
from torch.nn import functional

from drumline.base.errors import UsageError
from drumline.parallel.recompute import is_recomputed, recompute_in_backward

STD = 0.02
"""The standard deviation of initial weights."""


class GPT(nn.Module):
    """`forward(tokens [N, T]) -> logits [N, T, vocab_size]`, for any T up to `context`."""

    def __init__(
        self,
        *,
        vocab_size: int,
        context: int,
        layers: int,
        heads: int,
        width: int,
        dropout: float = 0.0,
        activation_checkpointing: bool | str = False,
    ) -> None:
        super().__init__()
        if width % heads:
            raise UsageError(
                f"gpt cannot split a width of {width} over {heads} heads",
                next_step=f"set --model.width to a multiple of {heads}, or change --model.heads",
            )
        self.context = context
        self.activation_checkpointing = activation_checkpointing
        self.token_embedding = NormalEmbedding(vocab_size, width)
        self.position_embedding = NormalEmbedding(context, width)
        self.dropout = nn.Dropout(dropout)
        # 2 * layers branches add up on the residual path; this keeps its variance independent of
        # the depth.
        residual_std = STD / math.sqrt(2 * layers)
        self.blocks = nn.ModuleList(
            Block(width, heads=heads, dropout=dropout, residual_std=residual_std)
            for _ in range(layers)
        )
        self.norm = nn.LayerNorm(width, bias=False)
        for module in self.modules():
            if isinstance(module, NormalLinear | NormalEmbedding):
                module.init_weights()

    def forward(self, tokens: Tensor) -> Tensor:
        # Shapes and types are known on the host, so the checks do not wait for the device.
        if tokens.dim() != 2 or tokens.is_floating_point():
            raise UsageError(
                f"gpt takes integer tokens of shape [N, T], got {tokens.dtype} of {list(tokens.shape)}",
                next_step="check what a sample of the dataset looks like",
            )
        length = tokens.shape[1]
        if length > self.context:
            raise UsageError(
                f"a sample has {length} tokens, but the model's context is {self.context}",
                next_step=f"set --model.context to {length} or more, or make shorter samples",
            )
        hidden = self.dropout(
            self.token_embedding(tokens) + self.position_embedding.weight[:length]
        )
        for number, block in enumerate(self.blocks):
            recompute = self.training and is_recomputed(self.activation_checkpointing, number)
            hidden = (
                recompute_in_backward(block, hidden, draws_random=self.dropout.p > 0)
                if recompute
                else block(hidden)
            )
        # The output layer is the embedding itself: fewer parameters, and no tensor twice in the
        # state dict.
        return functional.linear(self.norm(hidden), self.token_embedding.weight)


class NormalLinear(nn.Linear):
    """A linear layer without a bias, whose weights begin with this standard deviation."""

    def __init__(self, in_features: int, out_features: int, *, std: float = STD) -> None:
        super().__init__(in_features, out_features, bias=False)
        self.std = std

    def init_weights(self) -> None:
        nn.init.normal_(self.weight, std=self.std)


class NormalEmbedding(nn.Embedding):
    def init_weights(self) -> None:
        nn.init.normal_(self.weight, std=STD)


class Block(nn.Module):
    """Attention and a two-layer perceptron, each added to the residual path after its own norm."""

    def __init__(
        self, width: int, *, heads: int, dropout: float, residual_std: float = STD
    ) -> None:
        super().__init__()
        self.attention_norm = nn.LayerNorm(width, bias=False)
        self.attention = CausalAttention(
            width, heads=heads, dropout=dropout, residual_std=residual_std
        )
        self.mlp_norm = nn.LayerNorm(width, bias=False)
        self.mlp_in = NormalLinear(width, 4 * width)
        self.mlp_out = NormalLinear(4 * width, width, std=residual_std)
        self.dropout = nn.Dropout(dropout)

    def forward(self, hidden: Tensor) -> Tensor:
        hidden = hidden + self.dropout(self.attention(self.attention_norm(hidden)))
        # The tanh form, as in GPT-2; on a CPU it is also twice as fast.
        expanded = functional.gelu(self.mlp_in(self.mlp_norm(hidden)), approximate="tanh")
        outputs: Tensor = hidden + self.dropout(self.mlp_out(expanded))
        return outputs


class CausalAttention(nn.Module):
    """Each token attends to itself and to the tokens before it."""

    def __init__(
        self, width: int, *, heads: int, dropout: float, residual_std: float = STD
    ) -> None:
        super().__init__()
        self.heads = heads
        self.dropout = dropout
        self.query_key_value = NormalLinear(width, 3 * width)
        self.out = NormalLinear(width, width, std=residual_std)

    def forward(self, hidden: Tensor) -> Tensor:
        batch, length, width = hidden.shape
        # [N, T, 3 W] -> three of [N, heads, T, W / heads]
        split = self.query_key_value(hidden).view(batch, length, 3, self.heads, width // self.heads)
        query, key, value = split.permute(2, 0, 3, 1, 4).unbind()
        mixed = functional.scaled_dot_product_attention(
            query, key, value, dropout_p=self.dropout if self.training else 0.0, is_causal=True
        )
        outputs: Tensor = self.out(mixed.transpose(1, 2).reshape(batch, length, width))
        return outputs
