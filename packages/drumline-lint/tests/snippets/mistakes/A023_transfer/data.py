from torch.utils.data import DataLoader, DistributedSampler
from torchvision import datasets, transforms


def birds(root, batch_size):
    tf = transforms.Compose([transforms.RandomResizedCrop(224), transforms.RandomHorizontalFlip(),
                             transforms.ToTensor()])
    ds = datasets.ImageFolder(root, tf)
    sampler = DistributedSampler(ds, shuffle=True, drop_last=True)
    return DataLoader(ds, batch_size, sampler=sampler, num_workers=6, drop_last=True), sampler
