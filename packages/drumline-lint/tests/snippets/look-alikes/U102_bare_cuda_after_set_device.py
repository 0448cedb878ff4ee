import argparse
import os

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader
from torch.utils.data.distributed import DistributedSampler

from flow.chairs import FlyingChairs
from flow.raft import RAFT, sequence_loss


def init_distributed():
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group(backend="nccl")
    return dist.get_rank() == 0


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--root", default="/data/FlyingChairs")
    ap.add_argument("--steps", type=int, default=100_000)
    args = ap.parse_args()

    chief = init_distributed()
    device = torch.device("cuda")

    model = RAFT(small=False).to(device)
    model = DistributedDataParallel(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=4e-4, weight_decay=1e-4)
    scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, 4e-4, args.steps + 100, pct_start=0.05)

    ds = FlyingChairs(args.root, crop=(368, 496))
    sampler = DistributedSampler(ds, shuffle=True, drop_last=True)
    loader = DataLoader(ds, batch_size=4, sampler=sampler, num_workers=6, drop_last=True)

    step, epoch = 0, 0
    while step < args.steps:
        sampler.set_epoch(epoch)
        for img1, img2, flow, valid in loader:
            img1, img2 = img1.cuda(), img2.cuda()
            preds = model(img1, img2)
            loss = sequence_loss(preds, flow.cuda(), valid.cuda())
            optimizer.zero_grad()
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            scheduler.step()
            step += 1
            if chief and step % 5000 == 0:
                torch.save(model.module.state_dict(), f"checkpoints/{step}_raft.pth")
            if step == args.steps:
                break
        epoch += 1

    dist.destroy_process_group()


if __name__ == "__main__":
    main()
