import os

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

PATIENCE = 6


def load(split):
    d = torch.load(f"/data/wearables/{split}.pt", map_location="cpu")
    return TensorDataset(d["x"].float(), d["y"].long())


class LSTMNet(nn.Module):
    def __init__(self, channels=9, hidden=256, classes=18):
        super().__init__()
        self.rnn = nn.LSTM(channels, hidden, 2, batch_first=True, bidirectional=True, dropout=0.3)
        self.fc = nn.Linear(2 * hidden, classes)

    def forward(self, x):
        out, _ = self.rnn(x)
        return self.fc(out.mean(1))


@torch.no_grad()
def full_val_loss(net, loader):
    net.eval()
    total, n = 0.0, 0
    for x, y in loader:
        total += nn.functional.cross_entropy(net(x.cuda()), y.cuda(), reduction="sum").item()
        n += y.numel()
    return total / n


def main():
    dist.init_process_group("nccl")
    rank = dist.get_rank()
    local = int(os.environ["LOCAL_RANK"])
    torch.cuda.set_device(local)

    train = load("train")
    sampler = DistributedSampler(train)
    loader = DataLoader(train, 256, sampler=sampler, drop_last=True)
    val_loader = DataLoader(load("val"), 1024) if rank == 0 else None

    ddp = DDP(LSTMNet().cuda(), device_ids=[local])
    opt = torch.optim.AdamW(ddp.parameters(), 1e-3)
    best, bad = float("inf"), 0
    stop = torch.zeros(1, device="cuda")

    for epoch in range(300):
        sampler.set_epoch(epoch)
        ddp.train()
        for x, y in loader:
            loss = nn.functional.cross_entropy(ddp(x.cuda()), y.cuda())
            opt.zero_grad()
            loss.backward()
            opt.step()

        if rank == 0:
            v = full_val_loss(ddp.module, val_loader)
            if v < best:
                best, bad = v, 0
                torch.save(ddp.module.state_dict(), "har_best.pt")
            else:
                bad += 1
            print(f"{epoch} val {v:.4f} best {best:.4f}")
            stop.fill_(float(bad >= PATIENCE))
        dist.broadcast(stop, src=0)
        if stop.item():
            break
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
