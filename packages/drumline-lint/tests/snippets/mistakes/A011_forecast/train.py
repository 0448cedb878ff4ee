import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP

from config import Settings
from series import get_loader
from utils import is_main, setup_device


class Forecaster(torch.nn.Module):
    def __init__(self, horizon):
        super().__init__()
        self.enc = torch.nn.LSTM(1, 128, batch_first=True)
        self.head = torch.nn.Linear(128, horizon)

    def forward(self, x):
        _, (h, _) = self.enc(x)
        return self.head(h[-1])


def run_epoch(model, loader, device, optimizer):
    model.train()
    running_loss = 0.0
    for past, future in loader:
        past, future = past.to(device), future.to(device)
        optimizer.zero_grad()
        loss = torch.nn.functional.l1_loss(model(past), future)
        loss.backward()
        optimizer.step()
        running_loss += loss.item() * past.size(0)
    return running_loss / len(loader.dataset)


def main():
    s = Settings()
    device = setup_device()
    torch.manual_seed(s.seed + dist.get_rank())
    loader, sampler = get_loader(s.path, s.window, s.horizon, s.batch_size, s.seed)
    model = DDP(Forecaster(s.horizon).to(device), device_ids=[device.index])
    optimizer = torch.optim.RMSprop(model.parameters(), lr=s.lr)
    for epoch in range(s.epochs):
        sampler.set_epoch(epoch)
        train_loss = run_epoch(model, loader, device, optimizer)
        if is_main():
            print(f"epoch={epoch} train_mae={train_loss:.5f}", flush=True)
    if is_main():
        torch.save(model.module.state_dict(), s.out)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
