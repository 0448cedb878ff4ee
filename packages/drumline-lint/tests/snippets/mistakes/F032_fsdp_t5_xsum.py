import functools
import os

import torch
import torch.distributed as dist
from datasets import load_from_disk
from torch.distributed.fsdp import FullStateDictConfig, FullyShardedDataParallel as FSDP
from torch.distributed.fsdp import ShardingStrategy, StateDictType
from torch.distributed.fsdp.wrap import transformer_auto_wrap_policy
from torch.utils.data import DataLoader
from torch.utils.data.distributed import DistributedSampler
from transformers import AutoTokenizer, DataCollatorForSeq2Seq, T5ForConditionalGeneration
from transformers.models.t5.modeling_t5 import T5Block

MODEL = "google/t5-v1_1-xl"
EPOCHS = 3
BATCH = 4


def setup():
    dist.init_process_group("nccl")
    local_rank = int(os.environ["LOCAL_RANK"])
    torch.cuda.set_device(local_rank)
    return dist.get_rank(), local_rank


def make_loader(tokenizer):
    data = load_from_disk("data/xsum_tokenized")["train"]
    sampler = DistributedSampler(data, shuffle=True, drop_last=True)
    collate = DataCollatorForSeq2Seq(tokenizer, label_pad_token_id=-100)
    return sampler, DataLoader(data, BATCH, sampler=sampler, collate_fn=collate, num_workers=2)


def save_full(model, rank, path):
    cfg = FullStateDictConfig(offload_to_cpu=True, rank0_only=True)
    with FSDP.state_dict_type(model, StateDictType.FULL_STATE_DICT, cfg):
        state = model.state_dict()
    if rank == 0:
        torch.save(state, path)


def main():
    rank, local_rank = setup()
    tokenizer = AutoTokenizer.from_pretrained(MODEL)
    sampler, loader = make_loader(tokenizer)

    model = T5ForConditionalGeneration.from_pretrained(MODEL)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    scheduler = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.0, EPOCHS * len(loader))

    model = FSDP(
        model,
        auto_wrap_policy=functools.partial(transformer_auto_wrap_policy, transformer_layer_cls={T5Block}),
        sharding_strategy=ShardingStrategy.FULL_SHARD,
        device_id=local_rank,
    )

    for epoch in range(EPOCHS):
        sampler.set_epoch(epoch)
        model.train()
        total = torch.zeros(1, device="cuda")
        for batch in loader:
            batch = {k: v.cuda(non_blocking=True) for k, v in batch.items()}
            loss = model(**batch).loss
            loss.backward()
            model.clip_grad_norm_(1.0)
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
            scheduler.step()
            total += loss.detach()
        dist.all_reduce(total, op=dist.ReduceOp.AVG)
        if rank == 0:
            print(f"epoch {epoch}: {total.item() / len(loader):.4f}", flush=True)
        save_full(model, rank, f"t5xl_xsum_{epoch}.pt")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
