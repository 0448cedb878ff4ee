import os

import torch
import torch.distributed as dist
import torch.nn.functional as F
import torchvision
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler
from torchvision import transforms as T


class Trainer:
    def __init__(self, epochs=60):
        self.local_rank = int(os.environ["LOCAL_RANK"])
        torch.cuda.set_device(self.local_rank)
        dist.init_process_group("nccl")
        self.rank = dist.get_rank()
        self.epochs = epochs
        tf = T.Compose([T.RandomCrop(32, 4), T.RandomHorizontalFlip(), T.ToTensor()])
        train = torchvision.datasets.CIFAR10("/data/cifar", transform=tf)
        val = torchvision.datasets.CIFAR10("/data/cifar", train=False, transform=T.ToTensor())
        self.sampler = DistributedSampler(train)
        self.train_dl = DataLoader(train, 128, sampler=self.sampler, num_workers=4)
        self.val_dl = DataLoader(val, 1000, num_workers=2)
        self.net = torchvision.models.resnet18(num_classes=10).cuda()
        self.model = DDP(self.net, device_ids=[self.local_rank])
        self.opt = torch.optim.SGD(self.model.parameters(), 0.1, momentum=0.9, weight_decay=5e-4)
        self.sched = torch.optim.lr_scheduler.CosineAnnealingLR(self.opt, epochs)

    def train_epoch(self, epoch):
        self.sampler.set_epoch(epoch)
        self.model.train()
        for x, y in self.train_dl:
            loss = F.cross_entropy(self.model(x.cuda(non_blocking=True)), y.cuda(non_blocking=True))
            self.opt.zero_grad()
            loss.backward()
            self.opt.step()
        self.sched.step()

    @torch.no_grad()
    def evaluate(self):
        self.net.eval()
        hit = sum((self.net(x.cuda()).argmax(1).cpu() == y).sum().item() for x, y in self.val_dl)
        return hit / len(self.val_dl.dataset)

    def run(self):
        for epoch in range(self.epochs):
            self.train_epoch(epoch)
            if self.rank == 0:
                acc = self.evaluate()
                print(f"epoch {epoch} acc {acc:.4f}", flush=True)
                torch.save(self.net.state_dict(), "cifar.pt")
            dist.barrier()
        dist.destroy_process_group()


if __name__ == "__main__":
    Trainer().run()  # torchrun --standalone --nproc_per_node=2
