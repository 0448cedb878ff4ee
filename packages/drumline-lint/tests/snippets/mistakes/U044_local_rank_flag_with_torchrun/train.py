import argparse

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler

from reid.data import Market1501
from reid.losses import TripletCE
from reid.net import OSNet

parser = argparse.ArgumentParser("person re-id")
parser.add_argument("--local_rank", type=int, default=0)
parser.add_argument("--root", default="/data/market1501")
parser.add_argument("--epochs", type=int, default=120)
args = parser.parse_args()


def main():
    torch.cuda.set_device(args.local_rank)
    dist.init_process_group(backend="nccl", init_method="env://")
    device = torch.device("cuda", args.local_rank)

    ds = Market1501(args.root, "train")
    sampler = DistributedSampler(ds, shuffle=True, drop_last=True)
    loader = DataLoader(ds, batch_size=64, sampler=sampler, num_workers=6, pin_memory=True)
    net = DistributedDataParallel(OSNet(ds.num_ids).to(device),
                                  device_ids=[args.local_rank], output_device=args.local_rank)
    crit = TripletCE(margin=0.3)
    opt = torch.optim.Adam(net.parameters(), lr=3.5e-4, weight_decay=5e-4)

    for epoch in range(args.epochs):
        sampler.set_epoch(epoch)
        for img, pid in loader:
            feat, logit = net(img.to(device, non_blocking=True))
            loss = crit(feat, logit, pid.to(device, non_blocking=True))
            opt.zero_grad()
            loss.backward()
            opt.step()
        if dist.get_rank() == 0:
            torch.save(net.module.state_dict(), "osnet.pth")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
