import torch
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler
from torchvision.datasets import ImageFolder
from torchvision.transforms import Compose, RandomHorizontalFlip, Resize, ToTensor

from model import ConvNet
from utils.dist import cleanup, init_distributed, is_main_process, save_on_master, seed_everything


def main():
    device = init_distributed()
    seed_everything(0)
    data = ImageFolder("data/traffic", Compose([Resize((64, 64)), RandomHorizontalFlip(), ToTensor()]))
    sampler = DistributedSampler(data)
    loader = DataLoader(data, 128, sampler=sampler, num_workers=4, drop_last=True)
    model = DDP(ConvNet(num_classes=43).to(device), device_ids=[device.index])
    opt = torch.optim.Adam(model.parameters(), lr=1e-3)
    for epoch in range(30):
        sampler.set_epoch(epoch)
        model.train()
        for x, y in loader:
            loss = F.cross_entropy(model(x.to(device)), y.to(device))
            opt.zero_grad()
            loss.backward()
            opt.step()
        if is_main_process():
            print(epoch, loss.item())
        save_on_master({"model": model.state_dict(), "epoch": epoch}, "traffic.pt")
    cleanup()


if __name__ == "__main__":
    main()
