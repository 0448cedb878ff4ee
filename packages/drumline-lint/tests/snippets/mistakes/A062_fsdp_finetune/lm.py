from torch import nn


class Decoder(nn.TransformerEncoderLayer):
    def __init__(self, d):
        super().__init__(d, 32, 4 * d, batch_first=True, norm_first=True, dropout=0.0)


class LM(nn.Module):
    def __init__(self, vocab=32000, d=4096, n=32):
        super().__init__()
        self.emb = nn.Embedding(vocab, d)
        self.layers = nn.ModuleList(Decoder(d) for _ in range(n))
        self.head = nn.Linear(d, vocab, bias=False)

    def forward(self, ids):
        m = nn.Transformer.generate_square_subsequent_mask(ids.size(1), device=ids.device)
        h = self.emb(ids)
        for layer in self.layers:
            h = layer(h, src_mask=m)
        return self.head(h)
