"""A small VQ audio codec."""
import torch
import torch.nn as nn


class Codec(nn.Module):
    def __init__(self, dim=128, codes=1024):
        super().__init__()
        self.enc = nn.Sequential(nn.Conv1d(1, dim, 16, 8, 4), nn.ELU(), nn.Conv1d(dim, dim, 16, 8, 4))
        self.dec = nn.Sequential(nn.ConvTranspose1d(dim, dim, 16, 8, 4), nn.ELU(), nn.ConvTranspose1d(dim, 1, 16, 8, 4))
        self.book = nn.Embedding(codes, dim)

    def forward(self, wav):
        z = self.enc(wav).transpose(1, 2)
        idx = torch.cdist(z, self.book.weight.unsqueeze(0).expand(len(z), -1, -1)).argmin(-1)
        q = self.book(idx)
        commit = (z - q.detach()).pow(2).mean()
        book = (z.detach() - q).pow(2).mean()
        q = z + (q - z).detach()
        return self.dec(q.transpose(1, 2)), commit, book
