import argparse
import os

import torch
import torch.distributed as dist
import torch.nn.functional as F
import torchvision
import wandb
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler
from torchvision import transforms


def parse_args():
    p = argparse.ArgumentParser()
    p.add_argument("--data", required=True)
    p.add_argument("--arch", default="efficientnet_b0")
    p.add_argument("--lr", type=float, default=0.05)
    p.add_argument("--bs", type=int, default=96)
    p.add_argument("--epochs", type=int, default=60)
    p.add_argument("--project", default="plants")
    return p.parse_args()


def main():
    args = parse_args()
    local_rank = int(os.environ["LOCAL_RANK"])
    device = torch.device("cuda", local_rank)
    torch.cuda.set_device(device)
    dist.init_process_group("nccl", device_id=device)
    rank = dist.get_rank()
    torch.manual_seed(21 + rank)
    wandb.init(project=args.project, config=vars(args))

    tf = transforms.Compose([transforms.RandomResizedCrop(224), transforms.ToTensor()])
    ds = torchvision.datasets.ImageFolder(args.data, tf)
    sampler = DistributedSampler(ds, drop_last=True)
    loader = DataLoader(ds, args.bs, sampler=sampler, num_workers=8, pin_memory=True, drop_last=True)
    net = torchvision.models.get_model(args.arch, weights=None, num_classes=len(ds.classes)).to(device)
    net = DDP(torch.nn.SyncBatchNorm.convert_sync_batchnorm(net), device_ids=[local_rank])
    opt = torch.optim.SGD(net.parameters(), args.lr, momentum=0.9, nesterov=True)
    for epoch in range(args.epochs):
        sampler.set_epoch(epoch)
        net.train()
        loss_sum = torch.zeros((), device=device)
        for x, y in loader:
            loss = F.cross_entropy(net(x.to(device)), y.to(device), label_smoothing=0.1)
            opt.zero_grad(set_to_none=True)
            loss.backward()
            opt.step()
            loss_sum += loss.detach()
        dist.all_reduce(loss_sum, op=dist.ReduceOp.AVG)
        wandb.log({"train/loss": loss_sum.item() / len(loader), "epoch": epoch})
        if rank == 0:
            torch.save(net.module.state_dict(), f"{args.arch}.pt")
    wandb.finish()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
