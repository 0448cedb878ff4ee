import torch
from torch import nn


class Block(nn.Module):
    def __init__(self, d, h):
        super().__init__()
        self.n1, self.n2 = nn.LayerNorm(d), nn.LayerNorm(d)
        self.att = nn.MultiheadAttention(d, h, batch_first=True)
        self.mlp = nn.Sequential(nn.Linear(d, 4 * d), nn.GELU(), nn.Linear(4 * d, d))

    def forward(self, x, mask):
        y = self.n1(x)
        x = x + self.att(y, y, y, attn_mask=mask, need_weights=False)[0]
        return x + self.mlp(self.n2(x))


class GPT(nn.Module):
    def __init__(self, vocab=50304, d=1024, layers=24, heads=16, ctx=1024):
        super().__init__()
        self.tok, self.pos = nn.Embedding(vocab, d), nn.Embedding(ctx, d)
        self.blocks = nn.ModuleList(Block(d, heads) for _ in range(layers))
        self.norm, self.head = nn.LayerNorm(d), nn.Linear(d, vocab, bias=False)

    def forward(self, ids):
        n = ids.size(1)
        mask = torch.ones(n, n, dtype=torch.bool, device=ids.device).triu(1)
        x = self.tok(ids) + self.pos(torch.arange(n, device=ids.device))
        for b in self.blocks:
            x = b(x, mask)
        return self.head(self.norm(x))
