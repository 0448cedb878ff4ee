import json
import logging
import os
import sys

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, TensorDataset

log = logging.getLogger("ranker")


class Ranker(nn.Module):
    def __init__(self, n_dense, cardinalities, dim=32):
        super().__init__()
        self.emb = nn.ModuleList(nn.Embedding(c, dim) for c in cardinalities)
        width = n_dense + dim * len(cardinalities)
        self.mlp = nn.Sequential(nn.Linear(width, 512), nn.ReLU(), nn.Linear(512, 128), nn.ReLU(), nn.Linear(128, 1))

    def forward(self, dense, cat):
        parts = [dense] + [e(cat[:, i]) for i, e in enumerate(self.emb)]
        return self.mlp(torch.cat(parts, dim=1)).squeeze(1)


def load_split(root, name):
    dense = torch.from_numpy(np.load(f"{root}/{name}_dense.npy"))
    cat = torch.from_numpy(np.load(f"{root}/{name}_cat.npy")).long()
    label = torch.from_numpy(np.load(f"{root}/{name}_label.npy")).float()
    return TensorDataset(dense, cat, label)


def train_loader(cfg):
    ds = load_split(cfg["data"], "train")
    return DataLoader(ds, batch_size=cfg["per_gpu_batch"], shuffle=True, drop_last=True,
                      num_workers=cfg["workers"], pin_memory=True)


def main(cfg_path):
    with open(cfg_path) as f:
        cfg = json.load(f)
    dist.init_process_group("nccl")
    local_rank = int(os.environ["LOCAL_RANK"])
    torch.cuda.set_device(local_rank)
    rank, world = dist.get_rank(), dist.get_world_size()
    logging.basicConfig(level=logging.INFO if rank == 0 else logging.WARNING)

    loader = train_loader(cfg)
    with open(os.path.join(cfg["data"], "schema.json")) as f:
        schema = json.load(f)
    model = Ranker(schema["n_dense"], schema["cardinalities"]).cuda()
    model = DDP(model, device_ids=[local_rank])
    opt = torch.optim.Adagrad(model.parameters(), lr=cfg["lr"])
    loss_fn = nn.BCEWithLogitsLoss()
    log.info("world size %d, %d steps per epoch", world, len(loader))

    for epoch in range(cfg["epochs"]):
        running = torch.zeros((), device="cuda")
        for dense, cat, label in loader:
            dense, cat, label = (t.cuda(non_blocking=True) for t in (dense, cat, label))
            loss = loss_fn(model(dense, cat), label)
            opt.zero_grad(set_to_none=True)
            loss.backward()
            opt.step()
            running += loss.detach()
        dist.all_reduce(running)
        log.info("epoch %d train loss %.5f", epoch, running.item() / (world * len(loader)))
        if rank == 0:
            torch.save(model.module.state_dict(), os.path.join(cfg["out"], f"ranker_{epoch}.pt"))

    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1])
