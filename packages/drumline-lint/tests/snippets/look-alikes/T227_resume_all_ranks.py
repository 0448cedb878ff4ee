import os
from types import SimpleNamespace

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
import torchaudio
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, Dataset, DistributedSampler

cfg = SimpleNamespace(listing="data/vox_train.txt", speakers=5994, batch=128, epochs=60, lr=1e-3, ckpt="xvec.pt")


class Vox(Dataset):
    def __init__(self, listing):
        with open(listing) as f:
            self.rows = [l.split() for l in f]
        self.fbank = torchaudio.transforms.MelSpectrogram(16000, n_mels=40)

    def __len__(self):
        return len(self.rows)

    def __getitem__(self, i):
        spk, path = self.rows[i]
        wav, _ = torchaudio.load(path, num_frames=32000)
        wav = F.pad(wav, (0, 32000 - wav.size(1)))
        return self.fbank(wav)[0].clamp(min=1e-6).log(), int(spk)


class XVector(nn.Module):
    def __init__(self, n):
        super().__init__()
        layer = lambda i, o, k, d: nn.Sequential(nn.Conv1d(i, o, k, dilation=d), nn.ReLU(), nn.BatchNorm1d(o))
        self.tdnn = nn.Sequential(layer(40, 512, 5, 1), layer(512, 512, 3, 2), layer(512, 512, 3, 3),
                                  layer(512, 1500, 1, 1))
        self.emb, self.out = nn.Linear(3000, 512), nn.Linear(512, n)

    def forward(self, x):
        h = self.tdnn(x)
        return self.out(self.emb(torch.cat([h.mean(-1), h.std(-1)], 1)).relu())


def main():
    local_rank = int(os.environ["LOCAL_RANK"])
    torch.cuda.set_device(local_rank)
    dist.init_process_group("nccl")
    net = XVector(cfg.speakers).cuda()
    opt = torch.optim.Adam(net.parameters(), cfg.lr)
    start = 0
    if os.path.exists(cfg.ckpt):
        state = torch.load(cfg.ckpt, map_location="cpu")
        net.load_state_dict(state["net"])
        opt.load_state_dict(state["opt"])
        start = state["epoch"] + 1
        del state
    model = DDP(net, device_ids=[local_rank])
    ds = Vox(cfg.listing)
    sampler = DistributedSampler(ds, drop_last=True)
    loader = DataLoader(ds, cfg.batch, sampler=sampler, num_workers=8, drop_last=True)
    for epoch in range(start, cfg.epochs):
        sampler.set_epoch(epoch)
        model.train()
        for x, y in loader:
            loss = F.cross_entropy(model(x.cuda(non_blocking=True)), y.cuda(non_blocking=True))
            opt.zero_grad()
            loss.backward()
            opt.step()
        if dist.get_rank() == 0:
            print(epoch, f"{loss.item():.4f}")
            torch.save({"net": net.state_dict(), "opt": opt.state_dict(), "epoch": epoch}, cfg.ckpt + ".tmp")
            os.replace(cfg.ckpt + ".tmp", cfg.ckpt)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()  # ckpt lives on the shared file system; torchrun --nnodes=2 ...
