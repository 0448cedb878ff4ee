import torch.nn as nn


class DeepCTR(nn.Module):
    def __init__(self, buckets=1_000_000, dim=16, fields=26):
        super().__init__()
        self.emb = nn.Embedding(buckets, dim)
        self.mlp = nn.Sequential(nn.Flatten(), nn.Linear(dim * fields, 256), nn.ReLU(), nn.Linear(256, 1))

    def forward(self, x):
        return self.mlp(self.emb(x)).squeeze(1)
