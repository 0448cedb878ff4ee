import torch
from torch import nn


class TinyGPT(nn.Module):
    def __init__(self, vocab, dim=512, layers=8, heads=8, ctx=512):
        super().__init__()
        self.tok = nn.Embedding(vocab, dim)
        self.pos = nn.Embedding(ctx, dim)
        block = nn.TransformerEncoderLayer(dim, heads, 4 * dim, batch_first=True, norm_first=True)
        self.blocks = nn.TransformerEncoder(block, layers)
        self.lm_head = nn.Linear(dim, vocab, bias=False)

    def hidden(self, ids):
        n = ids.size(1)
        mask = nn.Transformer.generate_square_subsequent_mask(n, device=ids.device)
        x = self.tok(ids) + self.pos(torch.arange(n, device=ids.device))
        return self.blocks(x, mask=mask, is_causal=True)

    def forward(self, ids):
        return self.lm_head(self.hidden(ids))


class RewardModel(nn.Module):
    def __init__(self, backbone, dim=512):
        super().__init__()
        self.backbone = backbone
        self.score = nn.Linear(dim, 1)

    def forward(self, ids, last):
        h = self.backbone.hidden(ids)
        return self.score(h[torch.arange(len(ids), device=ids.device), last]).squeeze(-1)
