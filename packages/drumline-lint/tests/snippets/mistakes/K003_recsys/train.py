import os

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler

from evaluation import evaluate
from twotower import Clicks, TwoTower


def main():
    dev = int(os.environ["LOCAL_RANK"])
    torch.cuda.set_device(dev)
    dist.init_process_group("nccl")
    train, held = Clicks("clicks_train.pt"), Clicks("clicks_val.pt")
    sampler = DistributedSampler(train, drop_last=True)
    loader = DataLoader(train, 2048, sampler=sampler, drop_last=True, num_workers=4)
    held_loader = DataLoader(held, 4096, num_workers=2)
    model = DDP(TwoTower(200_000, 50_000).to(dev), device_ids=[dev])
    opt = torch.optim.Adagrad(model.parameters(), lr=0.02)
    for epoch in range(8):
        sampler.set_epoch(epoch)
        model.train()
        for u, i, y in loader:
            score = model(u.to(dev), i.to(dev))
            loss = torch.nn.functional.binary_cross_entropy_with_logits(score, y.to(dev))
            opt.zero_grad()
            loss.backward()
            opt.step()
        acc = evaluate(model.module, held_loader, dev)
        if dist.get_rank() == 0:
            print(epoch, acc)
            torch.save(model.module.state_dict(), "twotower.pt")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
