# torchrun --nproc_per_node=4 vae_molecules.py
import os

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

VOCAB, MAXLEN = 64, 120


class SmilesVAE(nn.Module):
    def __init__(self, hid=512, z=128):
        super().__init__()
        self.emb = nn.Embedding(VOCAB, 96, padding_idx=0)
        self.enc = nn.GRU(96, hid, batch_first=True)
        self.mu, self.lv = nn.Linear(hid, z), nn.Linear(hid, z)
        self.up = nn.Linear(z, hid)
        self.dec = nn.GRU(96, hid, batch_first=True)
        self.out = nn.Linear(hid, VOCAB)

    def encode(self, x):
        h = self.enc(self.emb(x))[1][-1]
        return self.mu(h), self.lv(h)

    def decode(self, z, x):
        h, _ = self.dec(self.emb(x), self.up(z)[None])
        return self.out(h)

    def forward(self, x):
        mu, lv = self.encode(x)
        z = mu + torch.randn_like(mu) * (0.5 * lv).exp()
        return self.decode(z, x[:, :-1]), mu, lv


def elbo(logits, x, mu, lv, beta):
    rec = F.cross_entropy(logits.flatten(0, 1), x[:, 1:].flatten(), ignore_index=0, reduction="sum") / x.size(0)
    kl = -0.5 * (1 + lv - mu.pow(2) - lv.exp()).sum(1).mean()
    return rec + beta * kl, rec.detach(), kl.detach()


class Trainer:
    def __init__(self, data_path):
        self.local = int(os.environ["LOCAL_RANK"])
        torch.cuda.set_device(self.local)
        self.model = DistributedDataParallel(SmilesVAE().cuda(), device_ids=[self.local])
        self.opt = torch.optim.Adam(self.model.parameters(), 5e-4)
        ds = TensorDataset(torch.load(data_path, map_location="cpu"))
        self.sampler = DistributedSampler(ds)
        self.loader = DataLoader(ds, 256, sampler=self.sampler, drop_last=True)

    def step(self, x, beta):
        logits, mu, lv = self.model.module(x)
        loss, rec, kl = elbo(logits, x, mu, lv, beta)
        self.opt.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(self.model.parameters(), 5.0)
        self.opt.step()
        return rec, kl

    def fit(self, epochs):
        for epoch in range(epochs):
            self.sampler.set_epoch(epoch)
            beta = min(1.0, epoch / 10)
            tot = torch.zeros(2, device="cuda")
            for (x,) in self.loader:
                tot += torch.stack(self.step(x.cuda(non_blocking=True), beta))
            dist.all_reduce(tot, op=dist.ReduceOp.AVG)
            if dist.get_rank() == 0:
                rec, kl = (tot / len(self.loader)).tolist()
                print(f"{epoch}: rec {rec:.2f} kl {kl:.2f}")
                torch.save(self.model.module.state_dict(), "vae.pt")


if __name__ == "__main__":
    dist.init_process_group("nccl")
    Trainer("data/zinc_ids.pt").fit(60)
    dist.destroy_process_group()
