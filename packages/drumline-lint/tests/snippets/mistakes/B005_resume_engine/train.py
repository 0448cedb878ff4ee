import torch
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler
from torchvision import transforms
from torchvision.datasets import ImageFolder

from checkpoint import Checkpointer
from env import launch, reduce_mean
from model import ConvNet

EPOCHS = 90


def run(env):
    torch.manual_seed(3 + env.rank)
    tf = transforms.Compose([transforms.RandomCrop(64, padding=8), transforms.ToTensor()])
    data = ImageFolder("data/tiny/train", tf)
    sampler = DistributedSampler(data, shuffle=True)
    loader = DataLoader(data, batch_size=256, sampler=sampler, num_workers=8, pin_memory=True, drop_last=True)

    net = ConvNet(num_classes=200).to(env.device)
    ddp = DDP(net, device_ids=[env.local_rank])
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.4, momentum=0.9, nesterov=True)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, EPOCHS)
    ckpt = Checkpointer("runs/tiny", env)
    start = ckpt.restore(net, optimizer, scheduler)

    for epoch in range(start, EPOCHS):
        sampler.set_epoch(epoch)
        ddp.train()
        running = 0.0
        for x, y in loader:
            x = x.to(env.device, non_blocking=True)
            y = y.to(env.device, non_blocking=True)
            loss = F.cross_entropy(ddp(x), y)
            optimizer.zero_grad(set_to_none=True)
            loss.backward()
            optimizer.step()
            running += loss.detach()
        scheduler.step()
        mean = reduce_mean(running / len(loader), env)
        if env.is_main:
            print(f"epoch {epoch} loss {mean:.4f}")
        ckpt.save(net, optimizer, scheduler, epoch)


if __name__ == "__main__":
    launch(run)
