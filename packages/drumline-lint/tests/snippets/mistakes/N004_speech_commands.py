import os

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler

from kws.features import LogMelDataset, collate
from kws.net import M5

CFG = dict(epochs=40, batch=256, lr=1e-3, root="/data/speech_commands")


def setup():
    dist.init_process_group("nccl")
    lr_ = int(os.environ["LOCAL_RANK"])
    torch.cuda.set_device(lr_)
    return lr_


def train_one_epoch(model, loader, optimizer, dev):
    model.train()
    total, n = 0.0, 0
    for wav, label in loader:
        wav, label = wav.to(dev), label.to(dev)
        optimizer.zero_grad()
        loss = F.nll_loss(model(wav), label)
        loss.backward()
        optimizer.step()
        total += loss.item() * len(label)
        n += len(label)
    return total / n


def main():
    dev = setup()
    ds = LogMelDataset(CFG["root"], subset="training")
    sampler = DistributedSampler(ds, shuffle=True, seed=7)
    loader = DataLoader(ds, batch_size=CFG["batch"], sampler=sampler,
                        collate_fn=collate, num_workers=6, drop_last=True)
    model = DDP(M5(n_output=35).to(dev), device_ids=[dev])
    optimizer = torch.optim.Adam(model.parameters(), lr=CFG["lr"])

    sampler.set_epoch(0)
    for epoch in range(CFG["epochs"]):
        loss = train_one_epoch(model, loader, optimizer, dev)
        if dist.get_rank() == 0:
            print(f"{epoch:3d} {loss:.4f}")
    if dist.get_rank() == 0:
        torch.save(model.module.state_dict(), "m5.pt")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
