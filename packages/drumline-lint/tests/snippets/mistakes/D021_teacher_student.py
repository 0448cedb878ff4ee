"""Distillation with the last two GPUs of each job computing teacher targets."""
import os

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler

from distil.data import Passages
from distil.models import student_net, teacher_net

N_TEACHERS = 2
STEPS = 50_000
SHAPE = (32, 256)


def groups(rank, world):
    students = list(range(world - N_TEACHERS))
    teachers = list(range(world - N_TEACHERS, world))
    if rank in students:
        return students, dist.new_group(students)
    return teachers, None


def student_loop(rank, device, group, n_students):
    data = Passages("/data/passages", length=SHAPE[1])
    sampler = DistributedSampler(data, num_replicas=n_students, rank=rank, shuffle=True, drop_last=True)
    loader = DataLoader(data, batch_size=SHAPE[0], sampler=sampler, num_workers=4, drop_last=True)
    model = DDP(student_net().to(device), device_ids=[device.index], process_group=group)
    opt = torch.optim.AdamW(model.parameters(), lr=3e-4)
    step, epoch = 0, 0
    while step < STEPS:
        sampler.set_epoch(epoch)
        for ids in loader:
            if step == STEPS:
                break
            ids = ids.to(device)
            mate = n_students + rank % N_TEACHERS
            dist.send(ids, dst=mate)
            soft = torch.empty(SHAPE[0], 1000, device=device)
            dist.recv(soft, src=mate)
            loss = F.kl_div(model(ids).log_softmax(-1), soft, reduction="batchmean")
            opt.zero_grad()
            loss.backward()
            opt.step()
            step += 1
        epoch += 1
    if rank == 0:
        torch.save(model.module.state_dict(), "student.pt")


@torch.no_grad()
def teacher_loop(rank, device, n_students):
    net = teacher_net("/models/teacher.pt").to(device).eval()
    pupils = [s for s in range(n_students) if s % N_TEACHERS == rank - n_students]
    ids = torch.empty(SHAPE, dtype=torch.long, device=device)
    for _ in range(STEPS):
        for s in pupils:
            dist.recv(ids, src=s)
            dist.send(net(ids).softmax(-1).float().contiguous(), dst=s)


def main():
    dist.init_process_group("nccl")
    rank, world = dist.get_rank(), dist.get_world_size()
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
    torch.cuda.set_device(device)
    members, group = groups(rank, world)
    if group is not None:
        student_loop(rank, device, group, len(members))
    else:
        teacher_loop(rank, device, world - len(members))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
