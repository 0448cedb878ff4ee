import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler
from torchvision import datasets, models, transforms

from dist_utils import local_zero_first, setup

ROOT = "/local_scratch/svhn"


def get_data(local_rank):
    tf = transforms.Compose([transforms.ToTensor(), transforms.Normalize(0.5, 0.5)])
    with local_zero_first(local_rank):
        return datasets.SVHN(ROOT, split="train", transform=tf, download=True)


def main():
    rank, local_rank = setup()
    device = torch.device("cuda", local_rank)
    torch.manual_seed(300 + rank)
    data = get_data(local_rank)
    sampler = DistributedSampler(data)
    loader = DataLoader(data, 256, sampler=sampler, num_workers=4, pin_memory=True, drop_last=True)
    model = DDP(models.resnet18(weights=None, num_classes=10).to(device), device_ids=[local_rank])
    opt = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=5e-4)
    for epoch in range(40):
        sampler.set_epoch(epoch)
        model.train()
        total = torch.zeros((), device=device)
        for x, y in loader:
            loss = F.cross_entropy(model(x.to(device, non_blocking=True)), y.to(device, non_blocking=True))
            opt.zero_grad(set_to_none=True)
            loss.backward()
            opt.step()
            total += loss.detach()
        total /= len(loader)
        dist.all_reduce(total, op=dist.ReduceOp.AVG)
        if rank == 0:
            print(f"epoch {epoch} loss {total.item():.4f}")
            torch.save(model.module.state_dict(), "svhn.pt")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
