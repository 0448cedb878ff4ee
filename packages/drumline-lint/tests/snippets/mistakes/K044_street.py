import os

import torch
import torch.distributed as dist
import torchvision
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader
from torch.utils.data.distributed import DistributedSampler
from torchvision import transforms as T


def folder(split):
    tf = T.Compose([T.Resize((224, 224)), T.ToTensor()])
    return torchvision.datasets.ImageFolder(f"/data/street/{split}", tf)


class Session:
    def __init__(self):
        self.local_rank = int(os.environ["LOCAL_RANK"])
        torch.cuda.set_device(self.local_rank)
        dist.init_process_group("nccl")
        self.rank = dist.get_rank()
        train = folder("train")
        self.sampler = DistributedSampler(train, drop_last=True)
        self.train_dl = DataLoader(train, 64, sampler=self.sampler, num_workers=6, drop_last=True)
        self.val_dl = DataLoader(folder("val"), 128, num_workers=4)
        net = torchvision.models.resnet18(num_classes=len(train.classes)).cuda()
        self.model = DDP(net, device_ids=[self.local_rank])
        self.opt = torch.optim.SGD(self.model.parameters(), lr=0.1, momentum=0.9)

    def train_epoch(self, epoch):
        self.sampler.set_epoch(epoch)
        self.model.train()
        for x, y in self.train_dl:
            loss = nn.functional.cross_entropy(self.model(x.cuda()), y.cuda())
            self.opt.zero_grad()
            loss.backward()
            self.opt.step()

    @torch.no_grad()
    def validate(self):
        self.model.eval()
        right = 0
        for x, y in self.val_dl:
            right += (self.model(x.cuda()).argmax(1).cpu() == y).sum().item()
        return right / len(self.val_dl.dataset)

    def run(self, epochs=30):
        for epoch in range(epochs):
            self.train_epoch(epoch)
            if self.rank == 0:
                print(f"{epoch}: top-1 {self.validate():.3f}")
                torch.save(self.model.module.state_dict(), "street.pt")
            dist.barrier()
        dist.destroy_process_group()


if __name__ == "__main__":
    Session().run()
