import functools
import os

import torch
import torch.distributed as dist
from torch.distributed.fsdp import FullStateDictConfig, FullyShardedDataParallel as FSDP, MixedPrecision, StateDictType
from torch.distributed.fsdp.wrap import transformer_auto_wrap_policy
from torch.utils.data import DataLoader, DistributedSampler
from datasets import load_dataset
from transformers import AutoTokenizer, DataCollatorForSeq2Seq, T5ForConditionalGeneration
from transformers.models.t5.modeling_t5 import T5Block

MODEL = "google/t5-v1_1-xl"


def tokenize(tok, batch):
    enc = tok(["summarize: " + d for d in batch["article"]], max_length=512, truncation=True)
    enc["labels"] = tok(text_target=batch["highlights"], max_length=128, truncation=True)["input_ids"]
    return enc


def save_full(model, path, rank):
    cfg = FullStateDictConfig(offload_to_cpu=True, rank0_only=True)
    with FSDP.state_dict_type(model, StateDictType.FULL_STATE_DICT, cfg):
        sd = model.state_dict()
    if rank == 0:
        torch.save(sd, path)


def fsdp_main():
    local_rank = int(os.environ["LOCAL_RANK"])
    torch.cuda.set_device(local_rank)
    dist.init_process_group("nccl")
    rank = dist.get_rank()

    tok = AutoTokenizer.from_pretrained(MODEL)
    model = T5ForConditionalGeneration.from_pretrained(MODEL)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, weight_decay=0.01)

    raw = load_dataset("cnn_dailymail", "3.0.0", split="train")
    ds = raw.map(functools.partial(tokenize, tok), batched=True, remove_columns=raw.column_names)
    sampler = DistributedSampler(ds, shuffle=True, drop_last=True)
    loader = DataLoader(ds, batch_size=4, sampler=sampler, collate_fn=DataCollatorForSeq2Seq(tok), num_workers=2)

    model = FSDP(
        model,
        auto_wrap_policy=functools.partial(transformer_auto_wrap_policy, transformer_layer_cls={T5Block}),
        mixed_precision=MixedPrecision(torch.bfloat16, torch.bfloat16, torch.bfloat16),
        device_id=local_rank,
    )
    scheduler = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.0, total_iters=3 * len(loader))

    for epoch in range(3):
        sampler.set_epoch(epoch)
        model.train()
        stat = torch.zeros(2, device=local_rank)
        for batch in loader:
            batch = batch.to(local_rank)
            loss = model(**batch).loss
            loss.backward()
            model.clip_grad_norm_(1.0)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
            stat[0] += loss.detach()
            stat[1] += 1
        dist.all_reduce(stat)
        if rank == 0:
            print(f"epoch {epoch} loss {(stat[0] / stat[1]).item():.4f}")
        save_full(model, f"t5_epoch{epoch}.pt", rank)
    dist.destroy_process_group()


if __name__ == "__main__":
    fsdp_main()
