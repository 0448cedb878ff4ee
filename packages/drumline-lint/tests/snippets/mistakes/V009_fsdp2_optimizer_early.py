import os

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.utils.data import DataLoader, DistributedSampler

from protein.data import SequenceDataset
from protein.model import ProteinEncoder


def build_optimizer(model, lr, wd):
    decay = [p for p in model.parameters() if p.ndim >= 2]
    plain = [p for p in model.parameters() if p.ndim < 2]
    return torch.optim.AdamW([
        {"params": decay, "weight_decay": wd},
        {"params": plain, "weight_decay": 0.0},
    ], lr=lr)


def shard(model, mesh):
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for block in model.blocks:
        fully_shard(block, mesh=mesh, mp_policy=policy)
    fully_shard(model, mesh=mesh, mp_policy=policy)


def main():
    local_rank = int(os.environ["LOCAL_RANK"])
    torch.cuda.set_device(local_rank)
    dist.init_process_group("nccl")
    mesh = init_device_mesh("cuda", (dist.get_world_size(),))

    torch.manual_seed(0)
    model = ProteinEncoder(layers=36, dim=2560).cuda()
    optimizer = build_optimizer(model, lr=4e-4, wd=0.01)
    shard(model, mesh)

    dataset = SequenceDataset("/data/uniref50")
    sampler = DistributedSampler(dataset, drop_last=True)
    loader = DataLoader(dataset, batch_size=16, sampler=sampler, num_workers=4)
    for epoch in range(10):
        sampler.set_epoch(epoch)
        for tokens, labels in loader:
            logits = model(tokens.cuda())
            loss = F.cross_entropy(logits.flatten(0, 1), labels.cuda().flatten(), ignore_index=-100)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        if dist.get_rank() == 0:
            print(epoch, loss.item())
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
