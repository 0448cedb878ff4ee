import os

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler
from torchvision import datasets, transforms

from wrn import WideResNet

NORM = transforms.Normalize((0.491, 0.482, 0.447), (0.247, 0.243, 0.262))


@torch.no_grad()
def test_error(net, loader):
    net.eval()
    wrong = 0
    for x, y in loader:
        wrong += (net(x.cuda()).argmax(1).cpu() != y).sum().item()
    return wrong / len(loader.dataset)


def main():
    local_rank = int(os.environ["LOCAL_RANK"])
    torch.cuda.set_device(local_rank)
    dist.init_process_group("nccl")
    rank = dist.get_rank()

    train_tf = transforms.Compose([transforms.RandomCrop(32, 4), transforms.RandomHorizontalFlip(),
                                   transforms.ToTensor(), NORM])
    test_tf = transforms.Compose([transforms.ToTensor(), NORM])
    train_set = datasets.CIFAR10("/data/cifar10", train=True, transform=train_tf)
    sampler = DistributedSampler(train_set, drop_last=True)
    train_loader = DataLoader(train_set, 128, sampler=sampler, num_workers=4, drop_last=True)
    test_loader = None
    if rank == 0:
        test_set = datasets.CIFAR10("/data/cifar10", train=False, transform=test_tf)
        test_loader = DataLoader(test_set, 500, num_workers=2)

    model = DDP(WideResNet(28, 10, 10).cuda(), device_ids=[local_rank])
    opt = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9, weight_decay=5e-4, nesterov=True)
    sched = torch.optim.lr_scheduler.MultiStepLR(opt, [60, 120, 160], 0.2)

    best = 1.0
    for epoch in range(200):
        sampler.set_epoch(epoch)
        model.train()
        for x, y in train_loader:
            loss = F.cross_entropy(model(x.cuda()), y.cuda())
            opt.zero_grad(set_to_none=True)
            loss.backward()
            opt.step()
        sched.step()

        if rank == 0:
            err = test_error(model.module, test_loader)
            print(f"epoch {epoch} test error {100 * err:.2f}%")
            if err < best:
                best = err
                torch.save(model.module.state_dict(), "wrn_best.pt")
        dist.barrier()

    dist.destroy_process_group()


if __name__ == "__main__":
    main()
