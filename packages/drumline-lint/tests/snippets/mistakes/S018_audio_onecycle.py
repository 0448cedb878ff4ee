"""Sound event tagging (AudioSet subset), 8 GPUs.
torchrun --nproc_per_node=8 audio_onecycle.py
"""
import os
from types import SimpleNamespace

import torch
import torch.distributed as dist
import torchaudio
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim.lr_scheduler import OneCycleLR
from torch.utils.data import DataLoader, Dataset, DistributedSampler

cfg = SimpleNamespace(manifest="audioset20k.tsv", classes=527, batch_size=24, epochs=40, max_lr=5e-4, sr=32000)


class Clips(Dataset):
    def __init__(self, manifest):
        with open(manifest) as f:
            self.rows = [l.rstrip("\n").split("\t") for l in f]

    def __len__(self):
        return len(self.rows)

    def __getitem__(self, i):
        path, labels = self.rows[i]
        wav, _ = torchaudio.load(path)
        wav = nn.functional.pad(wav[0], (0, max(0, 10 * cfg.sr - wav.shape[1])))[: 10 * cfg.sr]
        y = torch.zeros(cfg.classes)
        y[[int(k) for k in labels.split(",")]] = 1
        return wav, y


class Tagger(nn.Module):
    def __init__(self):
        super().__init__()
        self.mel = torchaudio.transforms.MelSpectrogram(cfg.sr, 1024, hop_length=320, n_mels=64)
        chans = [1, 64, 128, 256, 512]
        self.conv = nn.Sequential(*[
            nn.Sequential(nn.Conv2d(a, b, 3, padding=1), nn.GroupNorm(8, b), nn.ReLU(), nn.AvgPool2d(2))
            for a, b in zip(chans, chans[1:])])
        self.fc = nn.Linear(512, cfg.classes)

    def forward(self, wav):
        x = (self.mel(wav) + 1e-6).log()[:, None]
        return self.fc(self.conv(x).mean(3).amax(2))


def main():
    dist.init_process_group("nccl")
    local = int(os.environ["LOCAL_RANK"])
    torch.cuda.set_device(local)
    device = torch.device("cuda", local)

    dataset = Clips(cfg.manifest)
    sampler = DistributedSampler(dataset, drop_last=True)
    loader = DataLoader(dataset, batch_size=cfg.batch_size, sampler=sampler, num_workers=6, drop_last=True)

    model = DistributedDataParallel(Tagger().to(device), device_ids=[local])
    optimizer = torch.optim.AdamW(model.parameters(), lr=cfg.max_lr, weight_decay=1e-2)
    steps_per_epoch = len(dataset) // cfg.batch_size
    scheduler = OneCycleLR(optimizer, max_lr=cfg.max_lr, epochs=cfg.epochs, steps_per_epoch=steps_per_epoch)
    loss_fn = nn.BCEWithLogitsLoss()

    for epoch in range(cfg.epochs):
        sampler.set_epoch(epoch)
        model.train()
        tally = torch.zeros((), device=device)
        for wav, y in loader:
            loss = loss_fn(model(wav.to(device)), y.to(device))
            optimizer.zero_grad(set_to_none=True)
            loss.backward()
            optimizer.step()
            scheduler.step()
            tally += loss.detach()
        dist.all_reduce(tally, op=dist.ReduceOp.AVG)
        if dist.get_rank() == 0:
            print(f"epoch {epoch}  loss {tally.item() / len(loader):.4f}  lr {scheduler.get_last_lr()[0]:.2e}")
            torch.save(model.module.state_dict(), "tagger.pt")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
