"""FSDP2 fine-tuning: torchrun --nnodes=2 --nproc_per_node=8 ... tune.py"""
import os

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.utils.data import DataLoader, DistributedSampler

from lm import LanguageModel, load_pretrained, packed_dataset


def shard(model, mesh):
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for block in model.blocks:
        fully_shard(block, mesh=mesh, mp_policy=policy)
    fully_shard(model, mesh=mesh, mp_policy=policy)
    return model


def main():
    local_rank = int(os.environ["LOCAL_RANK"])
    torch.cuda.set_device(local_rank)
    dist.init_process_group("nccl")
    mesh = init_device_mesh("cuda", (dist.get_world_size(),))

    model = LanguageModel.from_config("configs/3b.json")
    load_pretrained(model, "/models/base-3b")
    model = shard(model, mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=8e-6, weight_decay=0.1, fused=True)

    data = packed_dataset("/data/contracts", length=8192)
    sampler = DistributedSampler(data, shuffle=True, drop_last=True)
    loader = DataLoader(data, batch_size=1, sampler=sampler, num_workers=2, pin_memory=True)

    for epoch in range(2):
        sampler.set_epoch(epoch)
        for step, tokens in enumerate(loader):
            tokens = tokens.cuda(non_blocking=True)
            loss = model(tokens[:, :-1], targets=tokens[:, 1:])
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
            if step % 20 == 0 and dist.get_rank() == 0:
                print(f"epoch {epoch} step {step} loss {loss.item():.3f}", flush=True)

        weights, optim = get_state_dict(model, optimizer)
        dcp.save({"model": weights, "optim": optim}, checkpoint_id=f"/lustre/contracts/epoch{epoch}")

    dist.destroy_process_group()


if __name__ == "__main__":
    main()
