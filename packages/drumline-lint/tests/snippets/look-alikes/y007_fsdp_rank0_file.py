"""Music transformer with FSDP, 8 GPUs (torchrun --standalone --nproc_per_node=8)."""
import os

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.distributed.fsdp import FullStateDictConfig, MixedPrecision, StateDictType
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
from torch.utils.data import DataLoader, DistributedSampler

from music import CodecTokens, DecoderLayer, MusicLM


def save_rank0(model, path):
    options = FullStateDictConfig(offload_to_cpu=True, rank0_only=True)
    with FSDP.state_dict_type(model, StateDictType.FULL_STATE_DICT, options):
        weights = model.state_dict()
    if dist.get_rank() == 0:
        torch.save(weights, path)
    del weights


def main():
    local_rank = int(os.environ["LOCAL_RANK"])
    torch.cuda.set_device(local_rank)
    dist.init_process_group("nccl")
    rank = dist.get_rank()
    torch.manual_seed(0)

    model = FSDP(
        MusicLM(layers=32, width=2560),
        auto_wrap_policy=ModuleWrapPolicy({DecoderLayer}),
        mixed_precision=MixedPrecision(param_dtype=torch.bfloat16),
        device_id=local_rank,
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)

    data = CodecTokens("/data/musiccaps", seconds=30)
    sampler = DistributedSampler(data, drop_last=True)
    loader = DataLoader(data, batch_size=2, sampler=sampler, num_workers=4, pin_memory=True)

    for epoch in range(6):
        sampler.set_epoch(epoch)
        for i, codes in enumerate(loader):
            codes = codes.cuda(non_blocking=True)
            logits = model(codes[:, :-1])
            loss = F.cross_entropy(logits.float().flatten(0, 1), codes[:, 1:].flatten())
            loss.backward()
            model.clip_grad_norm_(1.0)
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
            if rank == 0 and i % 50 == 0:
                print(f"{epoch}/{i}: {loss.item():.3f}", flush=True)
        save_rank0(model, f"/ckpt/music/epoch{epoch}.pt")

    dist.destroy_process_group()


if __name__ == "__main__":
    main()
