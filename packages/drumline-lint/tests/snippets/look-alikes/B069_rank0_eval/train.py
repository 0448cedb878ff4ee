import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler
from torchvision.datasets import ImageFolder
from torchvision.transforms import Compose, RandomHorizontalFlip, Resize, ToTensor

from env import launch, reduce_mean
from model import ConvNet


@torch.no_grad()
def validate(net, loader, device):
    net.eval()
    good = seen = 0
    for x, y in loader:
        good += (net(x.to(device)).argmax(1).cpu() == y).sum().item()
        seen += len(y)
    return good / seen


def train(env):
    torch.manual_seed(8 + env.rank)
    train_set = ImageFolder("data/fruit/train", Compose([Resize((96, 96)), RandomHorizontalFlip(), ToTensor()]))
    val_set = ImageFolder("data/fruit/val", Compose([Resize((96, 96)), ToTensor()]))
    sampler = DistributedSampler(train_set)
    loader = DataLoader(train_set, 64, sampler=sampler, num_workers=4, drop_last=True)
    val_loader = DataLoader(val_set, 128, num_workers=4)
    model = DDP(ConvNet(len(train_set.classes)).to(env.device), device_ids=[env.local_rank])
    opt = torch.optim.AdamW(model.parameters(), lr=5e-4)
    best = 0.0
    for epoch in range(40):
        sampler.set_epoch(epoch)
        model.train()
        total = 0.0
        for x, y in loader:
            loss = F.cross_entropy(model(x.to(env.device)), y.to(env.device))
            opt.zero_grad(set_to_none=True)
            loss.backward()
            opt.step()
            total += loss.item()
        mean = reduce_mean(total / len(loader), env)
        if env.is_main:
            acc = validate(model.module, val_loader, env.device)
            print(f"epoch {epoch} loss {mean:.4f} acc {acc:.4f}")
            if acc > best:
                best = acc
                torch.save(model.module.state_dict(), "fruit_best.pt")
        dist.barrier()


if __name__ == "__main__":
    launch(train)
