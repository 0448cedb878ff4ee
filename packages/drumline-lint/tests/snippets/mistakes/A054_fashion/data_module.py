from torch.utils.data import DataLoader, DistributedSampler
from torchvision import datasets, transforms


class FashionData:
    def __init__(self, root, batch_size):
        tf = transforms.Compose([transforms.ToTensor(), transforms.Normalize((0.286,), (0.353,))])
        self.batch_size = batch_size
        self.train = datasets.FashionMNIST(root, train=True, download=True, transform=tf)
        self.test = datasets.FashionMNIST(root, train=False, download=True, transform=tf)

    def train_loader(self):
        sampler = DistributedSampler(self.train, shuffle=True, drop_last=True)
        return DataLoader(self.train, self.batch_size, sampler=sampler, num_workers=2, drop_last=True), sampler

    def test_loader(self):
        return DataLoader(self.test, 1000, sampler=DistributedSampler(self.test, shuffle=False))
