import csv
import os

import torch
import torchaudio
from torch.utils.data import DataLoader, Dataset
from torch.utils.data.distributed import DistributedSampler


class Keywords(Dataset):
    def __init__(self, root, listing):
        self.root = root
        with open(os.path.join(root, listing), newline="") as f:
            self.rows = [(r["wav"], int(r["label"])) for r in csv.DictReader(f)]
        self.mel = torchaudio.transforms.MelSpectrogram(16000, n_fft=512, n_mels=40)

    def __len__(self):
        return len(self.rows)

    def __getitem__(self, i):
        path, label = self.rows[i]
        wav, _ = torchaudio.load(os.path.join(self.root, path))
        wav = wav[:, :16000]
        if wav.size(1) < 16000:
            wav = torch.nn.functional.pad(wav, (0, 16000 - wav.size(1)))
        return self.mel(wav).clamp(min=1e-5).log(), label


def train_loader(root, batch_size, workers=4):
    ds = Keywords(root, "train.csv")
    sampler = DistributedSampler(ds, shuffle=True, seed=17)
    return DataLoader(ds, batch_size=batch_size, sampler=sampler,
                      num_workers=workers, drop_last=True, pin_memory=True)
