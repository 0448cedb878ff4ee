import torch
from torch import nn


class DecoderLayer(nn.TransformerEncoderLayer):
    def __init__(self, d, h):
        super().__init__(d, h, 4 * d, batch_first=True, norm_first=True, dropout=0.0)


class LanguageModel(nn.Module):
    def __init__(self, vocab=32000, d=1024, n=16):
        super().__init__()
        self.emb = nn.Embedding(vocab, d)
        self.layers = nn.ModuleList(DecoderLayer(d, 16) for _ in range(n))
        self.head = nn.Linear(d, vocab, bias=False)

    @classmethod
    def pretrained(cls, path):
        model = cls()
        model.load_state_dict(torch.load(path, map_location="cpu", weights_only=True))
        return model

    def forward(self, ids):
        mask = nn.Transformer.generate_square_subsequent_mask(ids.size(1), device=ids.device)
        x = self.emb(ids)
        for layer in self.layers:
            x = layer(x, src_mask=mask)
        return self.head(x)
