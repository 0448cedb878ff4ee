"""
CIFAR-100 WideResNet trainer.

    torchrun --nproc_per_node 4 Q004_cifar_trainer.py
"""
import os

import torch
import torch.nn.functional as F
import torch.distributed as dist
import torchvision
import torchvision.transforms as T
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader
from torch.utils.data.distributed import DistributedSampler


class Trainer:
    def __init__(self, model, train_loader, val_loader, optimizer, scheduler, save_path):
        self.rank = dist.get_rank()
        self.local_rank = int(os.environ["LOCAL_RANK"])
        self.device = torch.device(f"cuda:{self.local_rank}")
        self.model = DDP(model.to(self.device), device_ids=[self.local_rank])
        self.train_loader = train_loader
        self.val_loader = val_loader
        self.optimizer = optimizer(self.model.parameters())
        self.scheduler = scheduler(self.optimizer)
        self.save_path = save_path
        self.best = 0.0

    def _step(self, images, labels):
        images = images.to(self.device, non_blocking=True)
        labels = labels.to(self.device, non_blocking=True)
        self.optimizer.zero_grad(set_to_none=True)
        loss = F.cross_entropy(self.model(images), labels)
        loss.backward()
        self.optimizer.step()
        return loss.detach()

    @torch.no_grad()
    def validate(self):
        self.model.eval()
        correct = total = 0
        for images, labels in self.val_loader:
            images, labels = images.to(self.device), labels.to(self.device)
            pred = self.model(images).argmax(dim=1)
            correct += (pred == labels).sum().item()
            total += labels.size(0)
        return correct / total

    def run(self, epochs):
        for epoch in range(epochs):
            self.train_loader.sampler.set_epoch(epoch)
            self.model.train()
            for images, labels in self.train_loader:
                loss = self._step(images, labels)
            self.scheduler.step()

            if self.rank == 0:
                acc = self.validate()
                print(f"epoch {epoch:03d} last loss {loss.item():.3f} val acc {acc:.3f}")
                if acc > self.best:
                    self.best = acc
                    torch.save(self.model.module.state_dict(), self.save_path)


def main():
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group(backend="nccl")
    torch.manual_seed(0)

    aug = T.Compose([T.RandomCrop(32, 4), T.RandomHorizontalFlip(), T.ToTensor()])
    train = torchvision.datasets.CIFAR100("/data/cifar", train=True, transform=aug)
    val = torchvision.datasets.CIFAR100("/data/cifar", train=False, transform=T.ToTensor())

    train_loader = DataLoader(train, 128, sampler=DistributedSampler(train), num_workers=4, pin_memory=True)
    val_loader = DataLoader(val, 512, shuffle=False, num_workers=4)

    Trainer(
        model=torchvision.models.wide_resnet50_2(num_classes=100),
        train_loader=train_loader,
        val_loader=val_loader,
        optimizer=lambda p: torch.optim.SGD(p, lr=0.2, momentum=0.9, nesterov=True, weight_decay=5e-4),
        scheduler=lambda o: torch.optim.lr_scheduler.CosineAnnealingLR(o, 200),
        save_path="wrn.pt",
    ).run(200)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
