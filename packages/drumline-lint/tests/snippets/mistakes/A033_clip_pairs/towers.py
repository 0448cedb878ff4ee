import torch
from torch import nn
from torch.nn.functional import normalize


class DualEncoder(nn.Module):
    def __init__(self, img_dim=2048, vocab=49408, dim=512):
        super().__init__()
        self.image = nn.Sequential(nn.Linear(img_dim, 1024), nn.GELU(), nn.Linear(1024, dim))
        self.text = nn.EmbeddingBag(vocab, dim, padding_idx=0)
        self.log_scale = nn.Parameter(torch.tensor(2.659))

    def forward(self, image, text):
        return normalize(self.image(image), dim=-1), normalize(self.text(text), dim=-1), self.log_scale.exp()
