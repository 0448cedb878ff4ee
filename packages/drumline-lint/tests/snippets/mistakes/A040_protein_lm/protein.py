import torch
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


class Layer(nn.TransformerEncoderLayer):
    def __init__(self, d):
        super().__init__(d, 16, 4 * d, batch_first=True, norm_first=True)


class ProteinLM(nn.Module):
    def __init__(self, d=1280, n=24, vocab=33):
        super().__init__()
        self.emb = nn.Embedding(vocab, d)
        self.layers = nn.ModuleList(Layer(d) for _ in range(n))
        self.head = nn.Linear(d, vocab)

    def forward(self, x):
        h = self.emb(x)
        for layer in self.layers:
            h = layer(h)
        return self.head(h)


def residues(path, batch):
    d = torch.load(path, map_location="cpu", weights_only=True)
    ds = TensorDataset(d["tokens"], d["labels"])
    sampler = DistributedSampler(ds, drop_last=True)
    return DataLoader(ds, batch, sampler=sampler, drop_last=True), sampler
