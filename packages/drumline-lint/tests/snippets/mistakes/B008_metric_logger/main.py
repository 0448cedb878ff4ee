import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset
from torchvision.models.segmentation import lraspp_mobilenet_v3_large

import misc
from engine import train_one_epoch


class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.net = lraspp_mobilenet_v3_large(weights=None, weights_backbone=None, num_classes=1)

    def forward(self, x):
        return self.net(x)["out"]


def main():
    local_rank = misc.init()
    torch.manual_seed(11 + dist.get_rank())
    blob = torch.load("data/roads.pt", map_location="cpu", weights_only=True)
    data = TensorDataset(blob["image"], blob["mask"])
    sampler = DistributedSampler(data)
    loader = DataLoader(data, 16, sampler=sampler, num_workers=4, drop_last=True)
    model = DDP(Net().cuda(), device_ids=[local_rank])
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4)
    for epoch in range(50):
        sampler.set_epoch(epoch)
        train_one_epoch(model, loader, optimizer, torch.device("cuda", local_rank), epoch)
        if misc.is_main_process():
            torch.save(model.module.state_dict(), "roads_last.pt")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
