import torch
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler
from torchvision import datasets, models, transforms

from engine import AmpEngine
from env import launch, reduce_mean

EPOCHS, BATCH = 100, 128


def run(env):
    torch.manual_seed(50 + env.rank)
    tf = transforms.Compose([
        transforms.RandomResizedCrop(176), transforms.RandomHorizontalFlip(), transforms.ToTensor(),
        transforms.Normalize((0.485, 0.456, 0.406), (0.229, 0.224, 0.225)),
    ])
    data = datasets.ImageFolder("/data/imagenet/train", tf)
    sampler = DistributedSampler(data)
    loader = DataLoader(data, BATCH, sampler=sampler, num_workers=8, pin_memory=True, drop_last=True)
    model = models.vit_b_16(weights=None, image_size=176).to(env.device)
    model = DDP(model, device_ids=[env.local_rank])
    opt = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.3)
    sched = torch.optim.lr_scheduler.OneCycleLR(opt, 1e-3, total_steps=EPOCHS * len(loader))
    engine = AmpEngine(model, opt, sched)
    for epoch in range(EPOCHS):
        sampler.set_epoch(epoch)
        model.train()
        total = torch.zeros((), device=env.device)
        for x, y in loader:
            total += engine.step(x.to(env.device, non_blocking=True), y.to(env.device, non_blocking=True))
        mean = reduce_mean(total.item() / len(loader), env)
        if env.is_main:
            print(f"epoch {epoch} loss {mean:.4f}")
            torch.save(engine.state_dict(), "vit.pt")


if __name__ == "__main__":
    launch(run)
