# torchrun --nproc_per_node=8 subgroup_eval.py
import os

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

TRAINERS = list(range(6))
EVALUATORS = [6, 7]


def build():
    return nn.Sequential(nn.Linear(40, 512), nn.ReLU(), nn.Linear(512, 512), nn.ReLU(), nn.Linear(512, 1))


def load(name):
    d = torch.load(name, map_location="cpu")
    return TensorDataset(d["x"], d["y"])


def push_weights(net):
    for p in net.state_dict().values():
        dist.broadcast(p, src=0)


def run_trainer(rank, gpu, group, epochs):
    ds = load("train.pt")
    sampler = DistributedSampler(ds, num_replicas=len(TRAINERS), rank=TRAINERS.index(rank))
    loader = DataLoader(ds, 1024, sampler=sampler)
    model = DDP(build().cuda(), device_ids=[gpu], process_group=group)
    opt = torch.optim.Adam(model.parameters(), 1e-3)
    for epoch in range(epochs):
        sampler.set_epoch(epoch)
        for x, y in loader:
            loss = nn.functional.mse_loss(model(x.cuda()), y.cuda())
            opt.zero_grad()
            loss.backward()
            opt.step()
        push_weights(model.module)


def run_evaluator(rank, group, epochs):
    ds = load("valid.pt")
    sampler = DistributedSampler(ds, num_replicas=len(EVALUATORS), rank=EVALUATORS.index(rank), shuffle=False)
    loader = DataLoader(ds, 4096, sampler=sampler)
    net = build().cuda().eval()
    for epoch in range(epochs):
        push_weights(net)
        acc = torch.zeros(2, device="cuda")
        with torch.no_grad():
            for x, y in loader:
                acc[0] += nn.functional.mse_loss(net(x.cuda()), y.cuda(), reduction="sum")
                acc[1] += y.numel()
        dist.all_reduce(acc, group=group)
        if rank == EVALUATORS[0]:
            print(f"epoch {epoch}: valid mse {(acc[0] / acc[1]).item():.5f}")
            torch.save(net.state_dict(), f"reg-{epoch}.pt")


def main(epochs=30):
    dist.init_process_group("nccl")
    rank, gpu = dist.get_rank(), int(os.environ["LOCAL_RANK"])
    torch.cuda.set_device(gpu)
    train_group = dist.new_group(TRAINERS)
    eval_group = dist.new_group(EVALUATORS)
    if rank in TRAINERS:
        run_trainer(rank, gpu, train_group, epochs)
    else:
        run_evaluator(rank, eval_group, epochs)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
