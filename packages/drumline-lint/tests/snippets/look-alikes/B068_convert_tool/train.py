import torch
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler
from torchvision.datasets import ImageFolder
from torchvision.transforms import Compose, RandomCrop, ToTensor

from model import ConvNet
from utils.dist import all_reduce_sum, cleanup, init_distributed, is_main_process, save_on_master, seed_everything


def main():
    device = init_distributed()
    seed_everything(1)
    data = ImageFolder("data/cinic/train", Compose([RandomCrop(32, 4), ToTensor()]))
    sampler = DistributedSampler(data)
    loader = DataLoader(data, 256, sampler=sampler, num_workers=4, pin_memory=True, drop_last=True)
    model = DDP(ConvNet(10).to(device), device_ids=[device.index])
    opt = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for epoch in range(60):
        sampler.set_epoch(epoch)
        model.train()
        total = 0.0
        for x, y in loader:
            loss = F.cross_entropy(model(x.to(device, non_blocking=True)), y.to(device, non_blocking=True))
            opt.zero_grad(set_to_none=True)
            loss.backward()
            opt.step()
            total += loss.item()
        total, batches = all_reduce_sum([total, len(loader)], device)
        if is_main_process():
            print(f"epoch {epoch} loss {total / batches:.4f}")
        save_on_master({"model": model.module.state_dict(), "epoch": epoch}, "cinic.pt")
    cleanup()


if __name__ == "__main__":
    main()
