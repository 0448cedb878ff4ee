import functools

import torch
import torch.nn.functional as F
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP
from torch.distributed.fsdp import MixedPrecision, ShardingStrategy
from torch.distributed.fsdp.wrap import transformer_auto_wrap_policy

from common import begin, end
from corpus import token_loader
from gpt import GPT, Block


def build_optimizer(model, lr, wd):
    decay = [p for p in model.parameters() if p.dim() >= 2]
    rest = [p for p in model.parameters() if p.dim() < 2]
    return torch.optim.AdamW([{"params": decay, "weight_decay": wd},
                              {"params": rest, "weight_decay": 0.0}], lr=lr)


def shard(model, local_rank):
    policy = functools.partial(transformer_auto_wrap_policy, transformer_layer_cls={Block})
    bf16 = MixedPrecision(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    return FSDP(model, auto_wrap_policy=policy, mixed_precision=bf16, device_id=local_rank,
                sharding_strategy=ShardingStrategy.FULL_SHARD, sync_module_states=True)


def main():
    local_rank = begin()
    model = GPT()
    optimizer = build_optimizer(model, lr=3e-4, wd=0.1)
    model = shard(model, local_rank)

    loader, sampler = token_loader("tokens.bin", batch_size=8)
    for epoch in range(2):
        sampler.set_epoch(epoch)
        for x, y in loader:
            x, y = x.to(local_rank), y.to(local_rank)
            logits = model(x)
            loss = F.cross_entropy(logits.float().flatten(0, 1), y.flatten())
            loss.backward()
            model.clip_grad_norm_(1.0)
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
    end()


if __name__ == "__main__":
    main()
