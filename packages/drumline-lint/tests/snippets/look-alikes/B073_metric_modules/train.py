import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, Subset

import comm
from data import ArrayDataset
from metrics import Accuracy


@torch.no_grad()
def validate(net, loader, device):
    net.eval()
    acc = Accuracy(device)
    for x, y in loader:
        acc.update(net(x.to(device)), y.to(device))
    return acc.compute()


def main():
    local_rank = comm.setup()
    device = torch.device("cuda", local_rank)
    torch.manual_seed(21 + comm.rank())
    train_set, val_set = ArrayDataset("data/ecg", "train"), ArrayDataset("data/ecg", "val")
    sampler = DistributedSampler(train_set)
    loader = DataLoader(train_set, 128, sampler=sampler, num_workers=2, drop_last=True)
    val_loader = DataLoader(Subset(val_set, range(comm.rank(), len(val_set), comm.world_size())), 256)
    net = nn.Sequential(
        nn.Conv1d(12, 64, 15, 2), nn.ReLU(), nn.Conv1d(64, 128, 9, 2), nn.ReLU(),
        nn.AdaptiveAvgPool1d(1), nn.Flatten(), nn.Linear(128, 5),
    ).to(device)
    model = DDP(net, device_ids=[local_rank])
    opt = torch.optim.AdamW(model.parameters(), lr=1e-3)
    best = 0.0
    for epoch in range(50):
        sampler.set_epoch(epoch)
        model.train()
        for x, y in loader:
            loss = F.cross_entropy(model(x.to(device)), y.to(device))
            opt.zero_grad(set_to_none=True)
            loss.backward()
            opt.step()
        acc = validate(net, val_loader, device)
        if comm.is_primary():
            print(f"epoch {epoch} val acc {acc:.4f}")
            if acc > best:
                torch.save(net.state_dict(), "ecg_best.pt")
        best = max(best, acc)
    comm.teardown()


if __name__ == "__main__":
    main()
