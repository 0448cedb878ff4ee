import functools
import os

import torch
import torch.distributed as dist
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP
from torch.distributed.fsdp import MixedPrecision, ShardingStrategy
from torch.distributed.fsdp.wrap import transformer_auto_wrap_policy
from torch.nn.utils import clip_grad_norm_
from torch.utils.data import DataLoader, DistributedSampler
from transformers import T5ForConditionalGeneration
from transformers.models.t5.modeling_t5 import T5Block

from qa.data import NaturalQuestions


def wrap(model, device):
    return FSDP(
        model,
        auto_wrap_policy=functools.partial(transformer_auto_wrap_policy, transformer_layer_cls={T5Block}),
        sharding_strategy=ShardingStrategy.FULL_SHARD,
        mixed_precision=MixedPrecision(torch.bfloat16, torch.bfloat16, torch.bfloat16),
        device_id=device,
        use_orig_params=True,
    )


def train_epoch(model, loader, optimizer, max_norm):
    model.train()
    running = torch.zeros(2, device="cuda")
    for batch in loader:
        batch = {k: v.cuda() for k, v in batch.items()}
        loss = model(**batch).loss
        loss.backward()
        clip_grad_norm_(model.parameters(), max_norm)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        running += torch.tensor([loss.item(), 1.0], device="cuda")
    dist.all_reduce(running)
    return (running[0] / running[1]).item()


def main():
    dist.init_process_group("nccl")
    local_rank = int(os.environ["LOCAL_RANK"])
    torch.cuda.set_device(local_rank)
    model = wrap(T5ForConditionalGeneration.from_pretrained("t5-3b"), local_rank)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    dataset = NaturalQuestions("/data/nq")
    sampler = DistributedSampler(dataset, drop_last=True)
    loader = DataLoader(dataset, 4, sampler=sampler, num_workers=2)
    for epoch in range(3):
        sampler.set_epoch(epoch)
        loss = train_epoch(model, loader, optimizer, max_norm=1.0)
        if dist.get_rank() == 0:
            print(f"epoch {epoch} loss {loss:.4f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
