import torch
from torch import nn
from torch.utils.data import Dataset


class Sequences(Dataset):
    def __init__(self, path):
        self.ids = torch.load(path, map_location="cpu")

    def __len__(self):
        return len(self.ids)

    def __getitem__(self, i):
        ids = self.ids[i].long()
        hide = torch.rand(ids.shape) < 0.15
        return ids.masked_fill(hide, 32), ids.masked_fill(~hide, -100)


class Block(nn.Module):
    def __init__(self, d):
        super().__init__()
        self.layer = nn.TransformerEncoderLayer(d, 16, 4 * d, batch_first=True, norm_first=True)

    def forward(self, x):
        return self.layer(x)


class ProteinLM(nn.Module):
    def __init__(self, vocab=33, d=1280, depth=20):
        super().__init__()
        self.emb = nn.Embedding(vocab, d)
        self.blocks = nn.ModuleList(Block(d) for _ in range(depth))
        self.head = nn.Linear(d, vocab)

    def forward(self, ids):
        h = self.emb(ids)
        for b in self.blocks:
            h = b(h)
        return self.head(h)
