import argparse
import os

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_state_dict
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

from build import build_model, build_optimizer, shard


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--base", default="configs/llama-1b")
    ap.add_argument("--data", default="data/packed.pt")
    ap.add_argument("--lr", type=float, default=3e-4)
    ap.add_argument("--wd", type=float, default=0.1)
    ap.add_argument("--epochs", type=int, default=1)
    cfg = ap.parse_args()

    local_rank = int(os.environ["LOCAL_RANK"])
    torch.cuda.set_device(local_rank)
    dist.init_process_group("nccl")
    torch.manual_seed(0)

    model = build_model(cfg)
    optimizer = build_optimizer(model, cfg)
    model = shard(model, torch.cuda.current_device())

    data = TensorDataset(torch.load(cfg.data, map_location="cpu", weights_only=True))
    sampler = DistributedSampler(data, drop_last=True)
    loader = DataLoader(data, 4, sampler=sampler, drop_last=True)
    for epoch in range(cfg.epochs):
        sampler.set_epoch(epoch)
        for step, (ids,) in enumerate(loader):
            ids = ids.cuda(non_blocking=True)
            loss = model(input_ids=ids, labels=ids).loss
            loss.backward()
            model.clip_grad_norm_(1.0)
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
            if step % 50 == 0:
                mean = loss.detach().clone()
                dist.all_reduce(mean, op=dist.ReduceOp.AVG)
                if dist.get_rank() == 0:
                    print(epoch, step, mean.item())
    weights, optim = get_state_dict(model, optimizer)
    dcp.save({"model": weights, "optim": optim}, checkpoint_id="out/dcp")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
