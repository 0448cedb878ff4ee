import contextlib
import os

import torch
import torch.distributed as dist
import torch.nn.functional as F
import torchaudio
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, Dataset
from torch.utils.data.distributed import DistributedSampler

ACCUM = 4
MICRO = 4


class Mixtures(Dataset):
    """Two-speaker mixtures of LibriMix, cut to four seconds at 8 kHz."""

    def __init__(self, listing, length=32000):
        with open(listing) as f:
            self.rows = [line.strip().split(",") for line in f]
        self.length = length

    def __len__(self):
        return len(self.rows)

    def __getitem__(self, i):
        waves = [torchaudio.load(p, num_frames=self.length)[0] for p in self.rows[i]]
        waves = [F.pad(w, (0, self.length - w.size(1))) for w in waves]
        return waves[0], torch.cat(waves[1:])


def si_snr(est, ref, eps=1e-8):
    est, ref = est - est.mean(-1, keepdim=True), ref - ref.mean(-1, keepdim=True)
    proj = (est * ref).sum(-1, keepdim=True) * ref / (ref.pow(2).sum(-1, keepdim=True) + eps)
    return 10 * torch.log10(proj.pow(2).sum(-1) / ((est - proj).pow(2).sum(-1) + eps) + eps)


def pit_loss(est, ref):
    straight = si_snr(est, ref).mean(-1)
    swapped = si_snr(est, ref.flip(1)).mean(-1)
    return -torch.maximum(straight, swapped).mean()


def main():
    dist.init_process_group("nccl")
    rank, local_rank = dist.get_rank(), int(os.environ["LOCAL_RANK"])
    torch.cuda.set_device(local_rank)

    data = Mixtures("data/libri2mix/train.csv")
    sampler = DistributedSampler(data, shuffle=True, drop_last=True)
    loader = DataLoader(data, MICRO, sampler=sampler, num_workers=6, drop_last=True)
    net = torchaudio.models.conv_tasnet_base(num_sources=2)
    model = DDP(net.cuda(), device_ids=[local_rank])
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)

    usable = len(loader) // ACCUM * ACCUM
    for epoch in range(100):
        sampler.set_epoch(epoch)
        model.train()
        for i, (mix, sources) in enumerate(loader):
            if i >= usable:
                break
            boundary = (i + 1) % ACCUM == 0
            with contextlib.nullcontext() if boundary else model.no_sync():
                loss = pit_loss(model(mix.cuda()), sources.cuda())
                (loss / ACCUM).backward()
            if boundary:
                torch.nn.utils.clip_grad_norm_(model.parameters(), 5.0)
                optimizer.step()
                optimizer.zero_grad(set_to_none=True)
        if rank == 0:
            print(f"epoch {epoch} SI-SNR {-loss.item():.2f} dB", flush=True)
            torch.save(model.module.state_dict(), "convtasnet.pt")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
