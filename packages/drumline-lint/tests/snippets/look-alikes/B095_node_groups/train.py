import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler
from torchvision.datasets import ImageFolder
from torchvision.transforms import Compose, RandomCrop, RandomHorizontalFlip, ToTensor

from groups import node_group
from model import ConvNet
from utils.dist import all_reduce_sum, cleanup, init_distributed, is_main_process, save_on_master, seed_everything


def main():
    device = init_distributed()
    seed_everything(0)
    group = node_group()
    net = nn.SyncBatchNorm.convert_sync_batchnorm(ConvNet(100), process_group=group).to(device)
    model = DDP(net, device_ids=[device.index])
    data = ImageFolder("data/in100/train", Compose([RandomCrop(128, pad_if_needed=True), RandomHorizontalFlip(), ToTensor()]))
    sampler = DistributedSampler(data)
    loader = DataLoader(data, 16, sampler=sampler, num_workers=6, pin_memory=True, drop_last=True)
    opt = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=1e-4)
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
        total, n = all_reduce_sum([total, len(loader)], device)
        if is_main_process():
            print(f"epoch {epoch} loss {total / n:.4f}")
        save_on_master(net.state_dict(), "in100.pt")
    cleanup()


if __name__ == "__main__":
    main()
