import os

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP

from data import make_loader
from model import Seq2Seq


def run(cfg):
    local_rank = int(os.environ["LOCAL_RANK"])
    torch.cuda.set_device(local_rank)
    dist.init_process_group("nccl")
    device = torch.device("cuda", local_rank)

    loader = make_loader(cfg["train_file"], cfg["batch_size"])
    net = DDP(Seq2Seq(cfg["vocab"]).to(device), device_ids=[local_rank])
    opt = torch.optim.Adam(net.parameters(), lr=cfg["lr"], betas=(0.9, 0.98))

    for epoch in range(cfg["epochs"]):
        for src, tgt in loader:
            src, tgt = src.to(device), tgt.to(device)
            logits = net(src, tgt[:, :-1])
            loss = torch.nn.functional.cross_entropy(
                logits.flatten(0, 1), tgt[:, 1:].flatten(), ignore_index=0)
            opt.zero_grad()
            loss.backward()
            torch.nn.utils.clip_grad_norm_(net.parameters(), 1.0)
            opt.step()
        if dist.get_rank() == 0:
            torch.save(net.module.state_dict(), f"mt_{epoch}.pt")
    dist.destroy_process_group()


if __name__ == "__main__":
    run({"train_file": "wmt.pt", "batch_size": 64, "vocab": 32000, "lr": 5e-4, "epochs": 20})
