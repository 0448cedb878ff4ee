import torch
from torch import nn
from torch.nn import functional as F


class JointTagger(nn.Module):
    """Shared encoder with a tagging head and a sentence head."""

    def __init__(self, vocab, tags, labels, dim=256):
        super().__init__()
        self.embed = nn.Embedding(vocab, dim, padding_idx=0)
        layer = nn.TransformerEncoderLayer(dim, 8, 4 * dim, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 4)
        self.tag_head = nn.Linear(dim, tags)
        self.cls_head = nn.Linear(dim, labels)

    def forward(self, ids):
        pad = ids.eq(0)
        h = self.encoder(self.embed(ids), src_key_padding_mask=pad)
        return self.tag_head(h), self.cls_head(h[:, 0])

    def compute_loss(self, ids, tags, label):
        tag_logits, cls_logits = self(ids)
        tag_loss = F.cross_entropy(tag_logits.flatten(0, 1), tags.flatten(), ignore_index=-100)
        return tag_loss + 0.5 * F.cross_entropy(cls_logits, label)
