from torch.utils.data import DataLoader, DistributedSampler
from torchvision import datasets as tvd
from torchvision import transforms as T

MEAN, STD = (0.4914, 0.4822, 0.4465), (0.2470, 0.2435, 0.2616)


def train_transform():
    return T.Compose([T.RandomCrop(32, 4), T.RandomHorizontalFlip(), T.ToTensor(), T.Normalize(MEAN, STD)])


def cifar_train(root, batch_size, workers=4):
    data = tvd.CIFAR100(root, train=True, transform=train_transform(), download=True)
    sampler = DistributedSampler(data, shuffle=True)
    return DataLoader(data, batch_size, sampler=sampler, num_workers=workers, pin_memory=True, drop_last=True)
