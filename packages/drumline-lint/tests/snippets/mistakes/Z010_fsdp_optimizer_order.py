"""Continue pre-training a 3B decoder with FSDP. torchrun --nproc_per_node=8, 2 nodes."""
import functools
import os

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_model_state_dict
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP
from torch.distributed.fsdp import MixedPrecision, ShardingStrategy
from torch.distributed.fsdp.wrap import transformer_auto_wrap_policy
from torch.utils.data import DataLoader, DistributedSampler

from decoder import Decoder, DecoderBlock, DecoderConfig
from packed import PackedTokens


def main():
    local_rank = int(os.environ["LOCAL_RANK"])
    torch.cuda.set_device(local_rank)
    dist.init_process_group("nccl")
    rank = dist.get_rank()

    model = Decoder(DecoderConfig.preset("3b"))
    model.load_state_dict(torch.load("/models/decoder-3b.pt", map_location="cpu", weights_only=True))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5, betas=(0.9, 0.95), weight_decay=0.1)

    policy = functools.partial(transformer_auto_wrap_policy, transformer_layer_cls={DecoderBlock})
    model = FSDP(
        model,
        auto_wrap_policy=policy,
        sharding_strategy=ShardingStrategy.FULL_SHARD,
        mixed_precision=MixedPrecision(param_dtype=torch.bfloat16, reduce_dtype=torch.float32),
        device_id=local_rank,
        limit_all_gathers=True,
    )

    data = PackedTokens("/data/pile-law", length=4096)
    sampler = DistributedSampler(data, shuffle=True, seed=1, drop_last=True)
    loader = DataLoader(data, batch_size=1, sampler=sampler, num_workers=2, pin_memory=True)

    model.train()
    for epoch in range(2):
        sampler.set_epoch(epoch)
        for step, tokens in enumerate(loader):
            tokens = tokens.cuda(non_blocking=True)
            loss = model(tokens[:, :-1], targets=tokens[:, 1:])
            loss.backward()
            model.clip_grad_norm_(1.0)
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
            if rank == 0 and step % 20 == 0:
                print(f"epoch {epoch} step {step} loss {loss.item():.3f}", flush=True)

        dcp.save({"model": get_model_state_dict(model)}, checkpoint_id=f"/lustre/law-3b/epoch{epoch}")

    dist.destroy_process_group()


if __name__ == "__main__":
    main()
