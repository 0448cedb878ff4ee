import os

import torch
import torch.distributed as dist
from datasets import load_dataset
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler
from transformers import (
    AutoModelForSequenceClassification,
    AutoTokenizer,
    DataCollatorWithPadding,
    get_linear_schedule_with_warmup,
)

from config import Config, num_training_steps


def dataset_for(cfg, tok):
    ds = load_dataset("glue", cfg.task, split="train")
    ds = ds.map(lambda b: tok(b["question1"], b["question2"], truncation=True, max_length=cfg.max_len), batched=True)
    return ds.select_columns(["input_ids", "attention_mask", "label"])


def optimizer_for(model, cfg):
    plain = [p for n, p in model.named_parameters() if not n.endswith("bias") and "LayerNorm" not in n]
    other = [p for n, p in model.named_parameters() if n.endswith("bias") or "LayerNorm" in n]
    return torch.optim.AdamW([{"params": plain, "weight_decay": cfg.weight_decay},
                              {"params": other, "weight_decay": 0.0}], lr=cfg.peak_lr, betas=cfg.betas)


def main():
    cfg = Config()
    local_rank = int(os.environ["LOCAL_RANK"])
    torch.cuda.set_device(local_rank)
    dist.init_process_group("nccl")
    rank = dist.get_rank()

    tok = AutoTokenizer.from_pretrained(cfg.model)
    train = dataset_for(cfg, tok)
    sampler = DistributedSampler(train, shuffle=True, seed=5)
    loader = DataLoader(train, cfg.per_gpu_batch, sampler=sampler, num_workers=4,
                        collate_fn=DataCollatorWithPadding(tok))

    net = AutoModelForSequenceClassification.from_pretrained(cfg.model, num_labels=2).cuda()
    model = DDP(net, device_ids=[local_rank])
    opt = optimizer_for(model, cfg)
    total = num_training_steps(cfg, train)
    sched = get_linear_schedule_with_warmup(opt, int(cfg.warmup_ratio * total), total)

    step = 0
    for epoch in range(cfg.epochs):
        sampler.set_epoch(epoch)
        model.train()
        for batch in loader:
            batch = {k: v.cuda(non_blocking=True) for k, v in batch.items()}
            loss = model(**batch).loss
            opt.zero_grad(set_to_none=True)
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            opt.step()
            sched.step()
            step += 1
            if rank == 0 and step % cfg.log_every == 0:
                print(f"step {step}/{total} loss {loss.item():.4f} lr {sched.get_last_lr()[0]:.2e}", flush=True)
        if rank == 0:
            net.save_pretrained(os.path.join(cfg.out, f"epoch{epoch}"))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
