import os
import random
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
import torch.nn as nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


class Checkpointer:
    def __init__(self, folder, rank, device):
        self.folder = Path(folder)
        self.folder.mkdir(parents=True, exist_ok=True)
        self.rank = rank
        self.device = device

    def save(self, epoch, model, opt):
        rng = {
            "python": random.getstate(),
            "numpy": np.random.get_state(),
            "torch": torch.get_rng_state(),
            "cuda": torch.cuda.get_rng_state(self.device),
        }
        torch.save(rng, self.folder / f"rng_rank{self.rank:03d}.pt")
        if self.rank == 0:
            torch.save({"epoch": epoch, "model": model.module.state_dict(), "opt": opt.state_dict()},
                       self.folder / "model.pt")
        dist.barrier()

    def restore(self, model, opt):
        main = self.folder / "model.pt"
        if not main.exists():
            return 0
        state = torch.load(main, map_location=self.device)
        model.module.load_state_dict(state["model"])
        opt.load_state_dict(state["opt"])
        rng = torch.load(self.folder / f"rng_rank{self.rank:03d}.pt", map_location="cpu", weights_only=False)
        random.setstate(rng["python"])
        np.random.set_state(rng["numpy"])
        torch.set_rng_state(rng["torch"])
        torch.cuda.set_rng_state(rng["cuda"], self.device)
        return state["epoch"] + 1


def main():
    local_rank = int(os.environ["LOCAL_RANK"])
    torch.cuda.set_device(local_rank)
    dist.init_process_group("nccl")
    rank = dist.get_rank()
    device = torch.device("cuda", local_rank)
    random.seed(rank)
    np.random.seed(rank)
    torch.manual_seed(rank)

    blob = torch.load("molecules.pt", map_location="cpu")
    data = TensorDataset(blob["fp"].float(), blob["logp"].float())
    sampler = DistributedSampler(data, seed=1)
    loader = DataLoader(data, 512, sampler=sampler, drop_last=True)
    net = nn.Sequential(nn.Linear(2048, 1024), nn.ReLU(), nn.Dropout(0.3), nn.Linear(1024, 1)).to(device)
    model = DDP(net, device_ids=[local_rank])
    opt = torch.optim.Adam(model.parameters(), lr=1e-3)
    ckpt = Checkpointer("runs/logp", rank, device)

    for epoch in range(ckpt.restore(model, opt), 100):
        sampler.set_epoch(epoch)
        for fp, logp in loader:
            loss = nn.functional.mse_loss(model(fp.to(device)).squeeze(1), logp.to(device))
            opt.zero_grad()
            loss.backward()
            opt.step()
        ckpt.save(epoch, model, opt)
        if rank == 0:
            print(epoch, loss.item(), flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
