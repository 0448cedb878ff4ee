import os

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler

from sent.data import Reviews
from sent.model import GRUClassifier


@torch.no_grad()
def full_accuracy(net, loader):
    """Every rank goes through all of the (small) dev set and gets the same number."""
    net.eval()
    hit = total = 0
    for x, y in loader:
        hit += (net(x.cuda()).argmax(1).cpu() == y).sum().item()
        total += len(y)
    net.train()
    return hit / total


def main():
    dist.init_process_group("nccl")
    rank, local_rank = dist.get_rank(), int(os.environ["LOCAL_RANK"])
    torch.cuda.set_device(local_rank)
    train, dev = Reviews("train"), Reviews("dev")
    sampler = DistributedSampler(train)
    train_loader = DataLoader(train, 64, sampler=sampler, drop_last=True)
    dev_loader = DataLoader(dev, 256, shuffle=False)
    model = DDP(GRUClassifier().cuda(), device_ids=[local_rank])
    opt = torch.optim.Adam(model.parameters(), lr=1e-3)
    best = 0.0
    for epoch in range(15):
        sampler.set_epoch(epoch)
        for x, y in train_loader:
            loss = torch.nn.functional.cross_entropy(model(x.cuda()), y.cuda())
            opt.zero_grad()
            loss.backward()
            opt.step()
        acc = full_accuracy(model.module, dev_loader)
        if rank == 0:
            print(epoch, acc)
            if acc > best:
                best = acc
                torch.save(model.module.state_dict(), "gru.pt")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
