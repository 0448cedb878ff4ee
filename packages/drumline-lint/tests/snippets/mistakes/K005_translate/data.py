import torch
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import DataLoader, Dataset


class Pairs(Dataset):
    def __init__(self, path):
        self.pairs = torch.load(path, map_location="cpu")

    def __len__(self):
        return len(self.pairs)

    def __getitem__(self, i):
        s, t = self.pairs[i]
        return torch.as_tensor(s), torch.as_tensor(t)


def collate(batch):
    src, tgt = zip(*batch)
    return pad_sequence(src, batch_first=True), pad_sequence(tgt, batch_first=True)


def make_loader(path, batch_size):
    gen = torch.Generator().manual_seed(1234)
    return DataLoader(Pairs(path), batch_size=batch_size, shuffle=True, generator=gen,
                      collate_fn=collate, num_workers=4, pin_memory=True, drop_last=True)
