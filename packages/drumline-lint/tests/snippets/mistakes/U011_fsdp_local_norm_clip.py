import os
from functools import partial

import torch
import torch.distributed as dist
from torch.distributed.fsdp import FullyShardedDataParallel, ShardingStrategy
from torch.distributed.fsdp.wrap import size_based_auto_wrap_policy
from torch.utils.data import DataLoader
from torch.utils.data.distributed import DistributedSampler
from transformers import T5ForConditionalGeneration, T5TokenizerFast

from summarize.data import CnnDailyMail


def fsdp_main():
    local_rank = int(os.environ["LOCAL_RANK"])
    torch.cuda.set_device(local_rank)
    dist.init_process_group("nccl")
    rank = dist.get_rank()

    tok = T5TokenizerFast.from_pretrained("t5-large")
    model = T5ForConditionalGeneration.from_pretrained("t5-large")
    model = FullyShardedDataParallel(
        model,
        auto_wrap_policy=partial(size_based_auto_wrap_policy, min_num_params=2_000_000),
        sharding_strategy=ShardingStrategy.FULL_SHARD,
        device_id=local_rank,
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-4)

    ds = CnnDailyMail(tok, "train", max_in=512, max_out=150)
    sampler = DistributedSampler(ds, shuffle=True, drop_last=True)
    loader = DataLoader(ds, batch_size=4, sampler=sampler, num_workers=2, pin_memory=True)

    for epoch in range(4):
        sampler.set_epoch(epoch)
        model.train()
        stats = torch.zeros(2, device=local_rank)
        for batch in loader:
            batch = {k: v.to(local_rank, non_blocking=True) for k, v in batch.items()}
            optimizer.zero_grad(set_to_none=True)
            loss = model(input_ids=batch["source_ids"], attention_mask=batch["source_mask"],
                         labels=batch["target_ids"]).loss
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), max_norm=1.0)
            optimizer.step()
            stats[0] += loss.detach()
            stats[1] += 1
        dist.all_reduce(stats, op=dist.ReduceOp.SUM)
        if rank == 0:
            print(f"epoch {epoch} train loss {(stats[0] / stats[1]).item():.4f}")

    weights = model.state_dict()
    if rank == 0:
        torch.save(weights, "t5_large_cnn.pt")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    fsdp_main()
