import argparse
import os

import torch
import torch.distributed as dist
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler

from recsys.data import ClickLog
from recsys.dlrm import DLRM


def load(path, model, optimizer):
    ckpt = torch.load(path, map_location="cpu")
    model.module.load_state_dict(ckpt["model"])
    optimizer.load_state_dict(ckpt["optimizer"])
    return ckpt["epoch"] + 1


def main(args):
    dist.init_process_group("nccl")
    rank = dist.get_rank()
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
    torch.cuda.set_device(device)

    data = ClickLog(args.data, days=range(23))
    sampler = DistributedSampler(data, shuffle=True)
    loader = DataLoader(data, batch_size=args.batch_size, sampler=sampler, num_workers=12, drop_last=True)

    model = DDP(DLRM(emb_dim=128).to(device), device_ids=[device.index])
    optimizer = torch.optim.Adagrad(model.parameters(), lr=args.lr)

    first = 0
    ckpt_path = os.path.join(args.out, "dlrm.pt")
    if rank == 0 and os.path.isfile(ckpt_path):
        first = load(ckpt_path, model, optimizer)
        print(f"resumed at epoch {first}")

    for epoch in range(first, args.epochs):
        sampler.set_epoch(epoch)
        model.train()
        for dense, sparse, click in loader:
            logit = model(dense.to(device), sparse.to(device)).squeeze(1)
            loss = F.binary_cross_entropy_with_logits(logit, click.to(device))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        if rank == 0:
            torch.save({"model": model.module.state_dict(),
                        "optimizer": optimizer.state_dict(),
                        "epoch": epoch}, ckpt_path)

    dist.destroy_process_group()


if __name__ == "__main__":
    ap = argparse.ArgumentParser()
    ap.add_argument("--data", default="/data/criteo")
    ap.add_argument("--out", default="/shared/dlrm")
    ap.add_argument("--batch_size", type=int, default=4096)
    ap.add_argument("--epochs", type=int, default=3)
    ap.add_argument("--lr", type=float, default=0.01)
    main(ap.parse_args())
