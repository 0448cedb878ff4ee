import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler
from torchvision import datasets, models, transforms


def main_worker(gpu, args):
    rank = args.node_rank * args.gpus + gpu
    device = torch.device("cuda", gpu)
    torch.cuda.set_device(device)
    dist.init_process_group(
        "nccl", init_method=args.dist_url, world_size=args.nodes * args.gpus, rank=rank, device_id=device
    )
    torch.manual_seed(args.seed + rank)
    tf = transforms.Compose([transforms.RandomResizedCrop(224), transforms.ToTensor()])
    data = datasets.ImageFolder(args.data, tf)
    sampler = DistributedSampler(data)
    loader = DataLoader(data, args.batch_size, sampler=sampler, num_workers=4, drop_last=True)
    model = DDP(models.resnet18(weights=None, num_classes=len(data.classes)).to(device), device_ids=[gpu])
    opt = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    for epoch in range(args.epochs):
        sampler.set_epoch(epoch)
        model.train()
        stat = torch.zeros(2, device=device)
        for x, y in loader:
            loss = F.cross_entropy(model(x.to(device, non_blocking=True)), y.to(device, non_blocking=True))
            opt.zero_grad(set_to_none=True)
            loss.backward()
            opt.step()
            stat += torch.stack([loss.detach(), torch.ones_like(loss)])
        dist.all_reduce(stat)
        if rank == 0:
            print(f"epoch {epoch} loss {(stat[0] / stat[1]).item():.4f}")
            torch.save(model.module.state_dict(), "dtd.pt")
    dist.destroy_process_group()
