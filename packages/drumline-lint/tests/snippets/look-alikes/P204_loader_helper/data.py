import os

from torch.utils.data import DataLoader, DistributedSampler
from torchvision import transforms as T
from torchvision.datasets import ImageFolder


class Birds:
    def __init__(self, root, batch, world_size, rank):
        tf = T.Compose([T.RandomResizedCrop(224), T.RandomHorizontalFlip(), T.ToTensor()])
        self.dataset = ImageFolder(os.path.join(root, "train"), tf)
        self.num_classes = len(self.dataset.classes)
        self._sampler = DistributedSampler(self.dataset, world_size, rank, shuffle=True)
        self._loader = DataLoader(self.dataset, batch, sampler=self._sampler, num_workers=4,
                                  pin_memory=True, drop_last=True)

    def new_epoch(self, epoch):
        self._sampler.set_epoch(epoch)
        return self._loader
