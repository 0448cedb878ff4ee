import socket
from contextlib import closing

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler

from pointnet.data import ModelNet40
from pointnet.model import PointNet2


def find_free_port():
    with closing(socket.socket(socket.AF_INET, socket.SOCK_STREAM)) as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


def worker(rank, world, port, opts):
    dist.init_process_group("nccl", init_method=f"tcp://127.0.0.1:{port}",
                            rank=rank, world_size=world)
    torch.cuda.set_device(dist.get_rank())

    ds = ModelNet40(opts["root"], split="train", points=1024)
    sampler = DistributedSampler(ds, num_replicas=world, rank=rank, drop_last=True)
    loader = DataLoader(ds, batch_size=opts["batch"] // world, sampler=sampler,
                        num_workers=4, drop_last=True)
    net = DDP(PointNet2(40).cuda(rank), device_ids=[rank])
    opt = torch.optim.Adam(net.parameters(), lr=opts["lr"])
    sched = torch.optim.lr_scheduler.StepLR(opt, 20, 0.7)

    for epoch in range(opts["epochs"]):
        sampler.set_epoch(epoch)
        net.train()
        hits = torch.zeros(2, device=rank)
        for pts, label in loader:
            pts, label = pts.cuda(rank), label.cuda(rank)
            out = net(pts)
            loss = F.nll_loss(out, label)
            opt.zero_grad()
            loss.backward()
            opt.step()
            hits += torch.stack([(out.argmax(1) == label).sum(), torch.tensor(label.numel(), device=rank)])
        sched.step()
        dist.all_reduce(hits)
        if rank == 0:
            print(f"epoch {epoch}: train acc {(hits[0] / hits[1]).item():.4f}")
            torch.save(net.module.state_dict(), "pointnet2.pt")
    dist.destroy_process_group()


if __name__ == "__main__":
    n = torch.cuda.device_count()
    options = {"root": "data/modelnet40", "batch": 96, "lr": 1e-3, "epochs": 200}
    mp.spawn(worker, args=(n, find_free_port(), options), nprocs=n)
