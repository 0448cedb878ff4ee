import os

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler

from graphs.data import PCQM
from graphs.model import Graphormer


def save_checkpoint(model, opt, epoch, path):
    tmp = path + ".tmp"
    torch.save({"model": model.module.state_dict(), "opt": opt.state_dict(), "epoch": epoch}, tmp)
    os.replace(tmp, path)


def worker(gpu, ngpus, cfg):
    dist.init_process_group("nccl", init_method="tcp://127.0.0.1:23456", rank=gpu, world_size=ngpus)
    torch.cuda.set_device(gpu)
    ds = PCQM(cfg["root"])
    sampler = DistributedSampler(ds)
    loader = DataLoader(ds, cfg["bs"], sampler=sampler, collate_fn=ds.collate, num_workers=4)
    model = DDP(Graphormer(layers=12).cuda(gpu), device_ids=[gpu])
    opt = torch.optim.AdamW(model.parameters(), lr=2e-4)

    for epoch in range(cfg["epochs"]):
        sampler.set_epoch(epoch)
        model.train()
        for batch in loader:
            batch = batch.to(gpu)
            loss = torch.nn.functional.l1_loss(model(batch), batch.y)
            opt.zero_grad()
            loss.backward()
            opt.step()
        if gpu == 0:
            save_checkpoint(model, opt, epoch, cfg["ckpt"])
            print(f"saved epoch {epoch}")
            dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    n = torch.cuda.device_count()
    conf = {"root": "/data/pcqm4m", "bs": 128, "epochs": 100, "ckpt": "graphormer.pt"}
    mp.spawn(worker, args=(n, conf), nprocs=n)
