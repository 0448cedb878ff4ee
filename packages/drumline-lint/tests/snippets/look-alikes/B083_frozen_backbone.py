import os
from types import SimpleNamespace

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler
from torchvision import datasets, models, transforms

ARGS = SimpleNamespace(root="data/aircraft", weights="weights/resnet50.pt", out="aircraft.pt", epochs=25,
                       batch=64, lr=1e-3, seed=2)


class Finetuned(nn.Module):
    def __init__(self, weights, classes):
        super().__init__()
        trunk = models.resnet50(weights=None)
        trunk.load_state_dict(torch.load(weights, map_location="cpu", weights_only=True))
        trunk.fc = nn.Identity()
        self.trunk = trunk.requires_grad_(False)
        self.neck = nn.Sequential(nn.Linear(2048, 512), nn.BatchNorm1d(512), nn.ReLU())
        self.head = nn.Linear(512, classes)

    def train(self, mode=True):
        super().train(mode)
        self.trunk.eval()
        return self

    def forward(self, x):
        with torch.no_grad():
            h = self.trunk(x)
        return self.head(self.neck(h))


def main(args):
    local_rank = int(os.environ["LOCAL_RANK"])
    device = torch.device("cuda", local_rank)
    torch.cuda.set_device(device)
    dist.init_process_group("nccl", device_id=device)
    rank = dist.get_rank()
    torch.manual_seed(args.seed + rank)
    tf = transforms.Compose([transforms.RandomResizedCrop(224, (0.5, 1.0)), transforms.RandomHorizontalFlip(),
                             transforms.ToTensor(), transforms.Normalize((0.485, 0.456, 0.406), (0.229, 0.224, 0.225))])
    data = datasets.ImageFolder(args.root, tf)
    sampler = DistributedSampler(data)
    loader = DataLoader(data, args.batch, sampler=sampler, num_workers=6, pin_memory=True, drop_last=True)
    net = nn.SyncBatchNorm.convert_sync_batchnorm(Finetuned(args.weights, len(data.classes))).to(device)
    model = DDP(net, device_ids=[local_rank])
    opt = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=args.lr)
    for epoch in range(args.epochs):
        sampler.set_epoch(epoch)
        model.train()
        stat = torch.zeros(2, device=device)
        for x, y in loader:
            loss = F.cross_entropy(model(x.to(device, non_blocking=True)), y.to(device, non_blocking=True))
            opt.zero_grad(set_to_none=True)
            loss.backward()
            opt.step()
            stat += torch.stack([loss.detach(), torch.ones_like(loss)])
        dist.all_reduce(stat)
        if rank == 0:
            print(f"epoch {epoch} loss {(stat[0] / stat[1]).item():.4f}")
            torch.save(net.state_dict(), args.out)
    dist.destroy_process_group()


if __name__ == "__main__":
    main(ARGS)
