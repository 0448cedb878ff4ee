"""Global weather transformer with FSDP; 2 nodes x 8 GPUs with torchrun."""
import os

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.distributed.fsdp import (
    FullStateDictConfig,
    FullyShardedDataParallel as FSDP,
    MixedPrecision,
    ShardingStrategy,
    StateDictType,
)
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
from torch.utils.data import DataLoader, DistributedSampler

from era5 import Era5Pairs
from wxnet import Block, WeatherTransformer


def save(model, path, rank):
    cfg = FullStateDictConfig(offload_to_cpu=True, rank0_only=True)
    with FSDP.state_dict_type(model, StateDictType.FULL_STATE_DICT, cfg):
        state = model.state_dict()
    if rank == 0:
        torch.save(state, path)


def main():
    local_rank = int(os.environ["LOCAL_RANK"])
    torch.cuda.set_device(local_rank)
    dist.init_process_group("nccl")
    rank = dist.get_rank()
    torch.manual_seed(3)

    model = FSDP(
        WeatherTransformer(depth=48, width=4096),
        auto_wrap_policy=ModuleWrapPolicy({Block}),
        sharding_strategy=ShardingStrategy.FULL_SHARD,
        mixed_precision=MixedPrecision(param_dtype=torch.bfloat16,
                                       reduce_dtype=torch.float32),
        device_id=torch.cuda.current_device(),
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-4, weight_decay=0.1)

    dataset = Era5Pairs("/data/era5", hours=6)
    sampler = DistributedSampler(dataset, shuffle=True, drop_last=True)
    loader = DataLoader(dataset, batch_size=1, sampler=sampler, num_workers=6, pin_memory=True)

    for epoch in range(10):
        sampler.set_epoch(epoch)
        for step, (now, later) in enumerate(loader):
            now = now.cuda(non_blocking=True)
            later = later.cuda(non_blocking=True)
            loss = F.mse_loss(model(now).float(), later)
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), max_norm=1.0)
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
            if rank == 0 and step % 25 == 0:
                print(f"{epoch}/{step} {loss.item():.5f}", flush=True)
        save(model, f"/ckpt/wx/epoch{epoch}.pt", rank)

    dist.destroy_process_group()


if __name__ == "__main__":
    main()
