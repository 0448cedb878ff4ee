import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, Subset

from data import ArrayDataset
from stopping import Patience
from utils import dist as D


@torch.no_grad()
def val_loss(net, loader, device):
    net.eval()
    total = n = 0
    for x, y in loader:
        total += nn.functional.l1_loss(net(x.to(device)).squeeze(-1), y.float().to(device), reduction="sum").item()
        n += len(y)
    total, n = D.all_reduce_sum([total, n], device)
    return total / n


def main():
    device = D.init_distributed()
    D.seed_everything(4)
    train, val = ArrayDataset("data/load", "train"), ArrayDataset("data/load", "val")
    sampler = DistributedSampler(train)
    loader = DataLoader(train, 256, sampler=sampler, drop_last=True)
    val_loader = DataLoader(Subset(val, range(D.get_rank(), len(val), D.get_world_size())), 256)
    net = nn.Sequential(nn.Flatten(), nn.Linear(168 * 8, 512), nn.GELU(), nn.Linear(512, 1)).to(device)
    model = DDP(net, device_ids=[device.index])
    opt = torch.optim.Adam(model.parameters(), lr=1e-3)
    patience = Patience(10, device)
    for epoch in range(500):
        sampler.set_epoch(epoch)
        model.train()
        for x, y in loader:
            loss = nn.functional.l1_loss(model(x.to(device)).squeeze(-1), y.float().to(device))
            opt.zero_grad(set_to_none=True)
            loss.backward()
            opt.step()
        value = val_loss(net, val_loader, device)
        if D.is_main_process():
            print(f"epoch {epoch} val {value:.4f}")
        D.save_on_master(net.state_dict(), "load.pt")
        if patience.should_stop(value):
            break
    D.cleanup()


if __name__ == "__main__":
    main()
