import os

import torch
import torch.distributed as dist
import wandb
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler

from bench.data import Synthetic
from bench.model import BigMLP


def init_logging(rank):
    return wandb.init(
        project="gpu-bench",
        group=os.environ["TORCHELASTIC_RUN_ID"],
        name=f"rank-{rank}",
        job_type="per-gpu",
    )


def main():
    dist.init_process_group("nccl")
    rank, local_rank = dist.get_rank(), int(os.environ["LOCAL_RANK"])
    torch.cuda.set_device(local_rank)
    run = init_logging(rank)
    ds = Synthetic(1_000_000)
    sampler = DistributedSampler(ds)
    loader = DataLoader(ds, 4096, sampler=sampler, num_workers=4, drop_last=True)
    model = DDP(BigMLP().cuda(), device_ids=[local_rank])
    opt = torch.optim.SGD(model.parameters(), lr=0.01)
    for epoch in range(3):
        sampler.set_epoch(epoch)
        for i, (x, y) in enumerate(loader):
            loss = torch.nn.functional.mse_loss(model(x.cuda()), y.cuda())
            opt.zero_grad()
            loss.backward()
            opt.step()
            if i % 50 == 0:
                run.log({"mem_gb": torch.cuda.max_memory_allocated() / 2**30,
                         "util": torch.cuda.utilization(local_rank), "loss": loss.item()})
    run.finish()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
