import torch
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import DataLoader, DistributedSampler


def collate(rows):
    return {
        "mels": pad_sequence([r["mel"] for r in rows], batch_first=True),
        "mel_lens": torch.tensor([len(r["mel"]) for r in rows]),
        "text": pad_sequence([r["text"] for r in rows], batch_first=True),
        "text_lens": torch.tensor([len(r["text"]) for r in rows]),
    }


def get_loader(manifest, batch_size):
    rows = torch.load(manifest, map_location="cpu", weights_only=True)
    sampler = DistributedSampler(rows, shuffle=True, drop_last=True)
    return DataLoader(rows, batch_size, sampler=sampler, collate_fn=collate, drop_last=True), sampler
