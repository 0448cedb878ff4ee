import torch
from omegaconf import OmegaConf
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, Subset

from data import ArrayDataset
from utils import dist as D


class EarlyStopping:
    def __init__(self, patience):
        self.patience, self.best, self.bad = patience, float("inf"), 0

    def __call__(self, value):
        if value < self.best - 1e-4:
            self.best, self.bad = value, 0
        else:
            self.bad += 1
        return self.bad >= self.patience


class Forecaster(nn.Module):
    def __init__(self, n_in, hidden):
        super().__init__()
        self.rnn = nn.GRU(n_in, hidden, num_layers=2, batch_first=True)
        self.out = nn.Linear(hidden, 1)

    def forward(self, x):
        h, _ = self.rnn(x)
        return self.out(h[:, -1]).squeeze(-1)


@torch.no_grad()
def eval_loss(net, loader, device):
    net.eval()
    err, n = 0.0, 0
    for x, y in loader:
        err += nn.functional.l1_loss(net(x.to(device)), y.float().to(device), reduction="sum").item()
        n += len(y)
    return err / n


def main():
    cfg = OmegaConf.load("conf/forecast.yaml")
    device = D.init_distributed()
    D.seed_everything(cfg.seed)
    train, val = ArrayDataset(cfg.root, "train"), ArrayDataset(cfg.root, "val")
    sampler = DistributedSampler(train)
    loader = DataLoader(train, cfg.batch, sampler=sampler, drop_last=True)
    part = Subset(val, range(D.get_rank(), len(val), D.get_world_size()))
    val_loader = DataLoader(part, cfg.batch)
    net = Forecaster(cfg.features, cfg.hidden).to(device)
    ddp = DDP(net, device_ids=[device.index])
    opt = torch.optim.AdamW(ddp.parameters(), lr=cfg.lr)
    stopper = EarlyStopping(cfg.patience)
    for epoch in range(cfg.epochs):
        sampler.set_epoch(epoch)
        ddp.train()
        for x, y in loader:
            loss = nn.functional.l1_loss(ddp(x.to(device)), y.float().to(device))
            opt.zero_grad()
            loss.backward()
            opt.step()
        val_loss = eval_loss(net, val_loader, device)
        if stopper(val_loss):
            break
        D.save_on_master(net.state_dict(), cfg.ckpt)
    D.cleanup()


if __name__ == "__main__":
    main()
