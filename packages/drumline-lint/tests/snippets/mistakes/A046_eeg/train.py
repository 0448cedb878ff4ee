import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel as DDP

from datasets_eeg import eeg_loaders
from models import EEGNet
from utils import EarlyStopping, get_device, is_main


@torch.no_grad()
def val_loss(model, loader, device):
    model.eval()
    total, n = 0.0, 0
    for x, y in loader:
        total += F.cross_entropy(model(x.to(device)), y.to(device), reduction="sum").item()
        n += y.numel()
    return total / n


def main():
    device = get_device()
    torch.manual_seed(3 + dist.get_rank())
    train_loader, val_loader, sampler = eeg_loaders("eeg.pt", 64)
    model = DDP(EEGNet().to(device), device_ids=[device.index])
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    stopper = EarlyStopping(patience=8)
    for epoch in range(300):
        sampler.set_epoch(epoch)
        model.train()
        for x, y in train_loader:
            loss = F.cross_entropy(model(x.to(device)), y.to(device))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        stopper(val_loss(model, val_loader, device))
        if stopper.should_stop:
            break
    if is_main():
        torch.save(model.module.state_dict(), "eegnet.pt")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
