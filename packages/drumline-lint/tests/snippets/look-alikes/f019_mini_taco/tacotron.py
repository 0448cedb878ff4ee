import torch
import torch.nn as nn
import torch.nn.functional as F


class MiniTaco(nn.Module):
    """Teacher-forced decoder with location-free attention."""

    def __init__(self, phones=80, mels=80, dim=256):
        super().__init__()
        self.emb = nn.Embedding(phones, dim)
        self.encoder = nn.LSTM(dim, dim // 2, 2, batch_first=True, bidirectional=True)
        self.prenet = nn.Sequential(nn.Linear(mels, dim), nn.ReLU(), nn.Dropout(0.5))
        self.decoder = nn.LSTM(dim, dim, 2, batch_first=True)
        self.attention = nn.MultiheadAttention(dim, 4, batch_first=True)
        self.out = nn.Linear(2 * dim, mels)

    def forward(self, phones, mels):
        memory, _ = self.encoder(self.emb(phones))
        shifted = F.pad(mels[:, :-1], (0, 0, 1, 0))
        h, _ = self.decoder(self.prenet(shifted))
        context, _ = self.attention(h, memory, memory, need_weights=False)
        return self.out(torch.cat([h, context], dim=-1))
