import functools
import os

import torch
import torch.distributed as dist
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP
from torch.distributed.fsdp import MixedPrecision
from torch.distributed.fsdp.wrap import transformer_auto_wrap_policy
from torch.utils.data import DataLoader
from torch.utils.data.distributed import DistributedSampler
from transformers import T5ForConditionalGeneration
from transformers.models.t5.modeling_t5 import T5Block

from data import SummaryPairs, collate


def setup():
    dist.init_process_group("nccl")
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))


def build():
    model = T5ForConditionalGeneration.from_pretrained("/models/t5-3b")
    policy = functools.partial(transformer_auto_wrap_policy, transformer_layer_cls={T5Block})
    bf16 = MixedPrecision(param_dtype=torch.bfloat16, reduce_dtype=torch.bfloat16, buffer_dtype=torch.bfloat16)
    return FSDP(model, auto_wrap_policy=policy, mixed_precision=bf16, device_id=torch.cuda.current_device())


def train(epochs=3, max_norm=1.0):
    dataset = SummaryPairs("/data/cnn_dm/train.arrow")
    sampler = DistributedSampler(dataset, shuffle=True)
    loader = DataLoader(dataset, batch_size=8, sampler=sampler, collate_fn=collate, num_workers=4)
    model = build()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    for epoch in range(epochs):
        sampler.set_epoch(epoch)
        model.train()
        for step, batch in enumerate(loader):
            batch = {k: v.cuda(non_blocking=True) for k, v in batch.items()}
            loss = model(**batch).loss
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), max_norm)
            optimizer.step()
            optimizer.zero_grad()
            if step % 100 == 0 and dist.get_rank() == 0:
                print(f"{epoch}/{step} loss {loss.item():.3f}")


if __name__ == "__main__":
    setup()
    train()
    dist.destroy_process_group()
