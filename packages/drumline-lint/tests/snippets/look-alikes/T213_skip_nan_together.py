import os

import torch
import torch.distributed as dist
import torch.nn as nn
import torchaudio
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, Dataset, DistributedSampler


class Pairs(Dataset):
    """noisy / clean wav pairs, 3 s at 16 kHz"""

    def __init__(self, listing):
        self.rows = [l.split() for l in open(listing)]

    def __len__(self):
        return len(self.rows)

    def __getitem__(self, i):
        return tuple(torchaudio.load(p, num_frames=48000)[0][0] for p in self.rows[i])


class Denoiser(nn.Module):
    def __init__(self, c=256):
        super().__init__()
        self.enc = nn.Conv1d(1, c, 16, 8)
        self.rnn = nn.LSTM(c, c, 3, batch_first=True)
        self.mask = nn.Linear(c, c)
        self.dec = nn.ConvTranspose1d(c, 1, 16, 8)

    def forward(self, x):
        h = self.enc(x[:, None]).relu()
        m = self.mask(self.rnn(h.transpose(1, 2))[0]).sigmoid().transpose(1, 2)
        return self.dec(h * m).squeeze(1)


def si_sdr(est, ref):
    a = (est * ref).sum(-1, keepdim=True) / ref.pow(2).sum(-1, keepdim=True)
    e = a * ref
    return 10 * torch.log10(e.pow(2).sum(-1) / (est - e).pow(2).sum(-1))


def main():
    local_rank = int(os.environ["LOCAL_RANK"])
    torch.cuda.set_device(local_rank)
    dist.init_process_group("nccl")
    ds = Pairs("data/vbd_train.scp")
    sampler = DistributedSampler(ds, drop_last=True)
    loader = DataLoader(ds, 12, sampler=sampler, num_workers=6, drop_last=True)
    model = DDP(Denoiser().cuda(), device_ids=[local_rank])
    opt = torch.optim.Adam(model.parameters(), 1e-3)

    for epoch in range(100):
        sampler.set_epoch(epoch)
        skipped = 0
        for noisy, clean in loader:
            loss = -si_sdr(model(noisy.cuda()), clean.cuda()).mean()
            bad = (~torch.isfinite(loss.detach())).float()
            dist.all_reduce(bad, op=dist.ReduceOp.MAX)
            if bad.item():
                skipped += 1
                continue
            opt.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 5)
            opt.step()
        if dist.get_rank() == 0:
            print(f"epoch {epoch} si-sdr {-loss.item():.2f} dB skipped {skipped}")
            torch.save(model.module.state_dict(), "denoiser.pt")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()  # torchrun
