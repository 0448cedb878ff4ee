import os
import tarfile
import urllib.request
from pathlib import Path

import click
import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
import torchaudio
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, Dataset
from torch.utils.data.distributed import DistributedSampler

from kws.model import BCResNet

URL = "http://mirror.internal/datasets/speech_commands_v0.02.tar.gz"
WORDS = ["yes", "no", "up", "down", "left", "right", "on", "off", "stop", "go"]


def prepare(root: Path):
    cache = root / "logmel"
    if cache.exists():
        return cache
    root.mkdir(parents=True, exist_ok=True)
    archive = root / "sc.tar.gz"
    urllib.request.urlretrieve(URL, archive)
    with tarfile.open(archive) as t:
        t.extractall(root / "wav")
    cache.mkdir(exist_ok=True)
    mel = torchaudio.transforms.MelSpectrogram(16000, n_fft=480, hop_length=160, n_mels=40)
    for label, word in enumerate(WORDS):
        for wav in sorted((root / "wav" / word).glob("*.wav")):
            x, _ = torchaudio.load(wav)
            x = F.pad(x, (0, max(0, 16000 - x.size(1))))[:, :16000]
            np.save(cache / f"{label}_{wav.stem}.npy", torch.log(mel(x) + 1e-6).numpy())
    return cache


class Commands(Dataset):
    def __init__(self, cache):
        self.files = sorted(cache.glob("*.npy"))

    def __len__(self):
        return len(self.files)

    def __getitem__(self, i):
        return torch.from_numpy(np.load(self.files[i])), int(self.files[i].name.split("_")[0])


@click.command()
@click.option("--root", type=click.Path(path_type=Path), default="/shared/speech_commands")
@click.option("--epochs", default=40)
@click.option("--batch-size", default=256, help="per GPU")
@click.option("--lr", default=0.05)
def main(root, epochs, batch_size, lr):
    dist.init_process_group("nccl")
    local_rank = int(os.environ["LOCAL_RANK"])
    torch.cuda.set_device(local_rank)
    rank = dist.get_rank()

    cache = prepare(root)
    dist.barrier()
    ds = Commands(cache)
    sampler = DistributedSampler(ds, shuffle=True)
    loader = DataLoader(ds, batch_size, sampler=sampler, num_workers=6, drop_last=True, pin_memory=True)

    model = torch.nn.SyncBatchNorm.convert_sync_batchnorm(BCResNet(len(WORDS)).cuda())
    model = DDP(model, device_ids=[local_rank])
    opt = torch.optim.SGD(model.parameters(), lr=lr, momentum=0.9, weight_decay=1e-3)
    sched = torch.optim.lr_scheduler.CosineAnnealingLR(opt, epochs)
    for epoch in range(epochs):
        sampler.set_epoch(epoch)
        model.train()
        for x, y in loader:
            loss = F.cross_entropy(model(x.cuda(non_blocking=True)), y.cuda(non_blocking=True))
            opt.zero_grad(set_to_none=True)
            loss.backward()
            opt.step()
        sched.step()
        if rank == 0:
            print(f"epoch {epoch} loss {loss.item():.3f}", flush=True)
            torch.save(model.module.state_dict(), "bcresnet.pt")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
