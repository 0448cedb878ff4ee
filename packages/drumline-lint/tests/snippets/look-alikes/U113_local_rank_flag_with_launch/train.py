import argparse

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler

from lane.culane import CULane
from lane.erfnet import ERFNet, lane_loss

parser = argparse.ArgumentParser("lane detection")
parser.add_argument("--local_rank", "--local-rank", dest="local_rank", type=int, default=0)
parser.add_argument("--root", default="/data/culane")
parser.add_argument("--epochs", type=int, default=12)
args = parser.parse_args()


def main():
    torch.cuda.set_device(args.local_rank)
    dist.init_process_group(backend="nccl", init_method="env://")

    ds = CULane(args.root, "train")
    sampler = DistributedSampler(ds, shuffle=True, drop_last=True)
    loader = DataLoader(ds, batch_size=12, sampler=sampler, num_workers=6, pin_memory=True)
    net = DistributedDataParallel(ERFNet(5).cuda(), device_ids=[args.local_rank],
                                  output_device=args.local_rank)
    opt = torch.optim.SGD(net.parameters(), lr=0.01, momentum=0.9, weight_decay=1e-4)
    total = args.epochs * len(loader)
    sched = torch.optim.lr_scheduler.LambdaLR(opt, lambda it: (1 - it / total) ** 0.9)

    for epoch in range(args.epochs):
        sampler.set_epoch(epoch)
        net.train()
        for img, seg, exist in loader:
            loss = lane_loss(net(img.cuda(non_blocking=True)), seg.cuda(), exist.cuda())
            opt.zero_grad()
            loss.backward()
            opt.step()
            sched.step()
        if dist.get_rank() == 0:
            print(f"epoch {epoch} loss {loss.item():.4f}")
            torch.save(net.module.state_dict(), "erfnet.pth")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
