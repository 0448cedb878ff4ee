import argparse
import time

import torch
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel as DDP
from torchvision.models import resnet34

import comm
from datasets import cifar_train


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--root", default="./data")
    ap.add_argument("--epochs", type=int, default=200)
    ap.add_argument("--lr", type=float, default=0.1)
    args = ap.parse_args()

    local_rank = comm.setup()
    device = torch.device("cuda", local_rank)
    torch.manual_seed(comm.rank())
    loader = cifar_train(args.root, batch_size=128)
    model = DDP(resnet34(weights=None, num_classes=100).to(device), device_ids=[local_rank])
    opt = torch.optim.SGD(model.parameters(), lr=args.lr * comm.world_size(), momentum=0.9, weight_decay=5e-4)
    sched = torch.optim.lr_scheduler.OneCycleLR(opt, args.lr * comm.world_size(), total_steps=args.epochs * len(loader))
    for epoch in range(args.epochs):
        start = time.time()
        loader.sampler.set_epoch(epoch)
        model.train()
        good = seen = 0
        for x, y in loader:
            x, y = x.to(device, non_blocking=True), y.to(device, non_blocking=True)
            logits = model(x)
            loss = F.cross_entropy(logits, y)
            opt.zero_grad(set_to_none=True)
            loss.backward()
            opt.step()
            sched.step()
            good += (logits.argmax(1) == y).sum().item()
            seen += len(y)
        stats = comm.reduce_dict({"acc": good / seen, "loss": loss.item()}, device)
        if comm.is_primary():
            print(f"epoch {epoch} {stats} {time.time() - start:.1f}s")
            torch.save(model.module.state_dict(), "resnet34.pt")
    comm.teardown()


if __name__ == "__main__":
    main()
