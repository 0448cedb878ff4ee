import torch
from torch import nn


class NanoLM(nn.Module):
    def __init__(self, vocab=65, d=384, n=6, ctx=256):
        super().__init__()
        self.tok, self.pos = nn.Embedding(vocab, d), nn.Embedding(ctx, d)
        layer = nn.TransformerEncoderLayer(d, 6, 4 * d, batch_first=True, norm_first=True)
        self.body = nn.TransformerEncoder(layer, n)
        self.head = nn.Linear(d, vocab)

    def forward(self, x):
        t = x.size(1)
        mask = nn.Transformer.generate_square_subsequent_mask(t, device=x.device)
        return self.head(self.body(self.tok(x) + self.pos(torch.arange(t, device=x.device)), mask=mask))
