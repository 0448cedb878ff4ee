import os
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler
from transformers import AutoModelForMaskedLM, AutoTokenizer, DataCollatorForLanguageModeling

from prepare import get_data


def main():
    local_rank = int(os.environ["LOCAL_RANK"])
    device = torch.device("cuda", local_rank)
    torch.cuda.set_device(device)
    dist.init_process_group("nccl", timeout=timedelta(hours=12), device_id=device)
    rank = dist.get_rank()
    torch.manual_seed(rank)
    tok = AutoTokenizer.from_pretrained("roberta-base")
    data = get_data("dump/*.jsonl", tok, "dump/tokenized")
    sampler = DistributedSampler(data)
    loader = DataLoader(data, 32, sampler=sampler, num_workers=4, drop_last=True,
                        collate_fn=DataCollatorForLanguageModeling(tok))
    model = DDP(AutoModelForMaskedLM.from_pretrained("roberta-base").to(device), device_ids=[local_rank])
    opt = torch.optim.AdamW(model.parameters(), lr=5e-5)
    for epoch in range(3):
        sampler.set_epoch(epoch)
        model.train()
        stat = torch.zeros(2, device=device)
        for batch in loader:
            batch = {k: v.to(device, non_blocking=True) for k, v in batch.items()}
            with torch.autocast("cuda", dtype=torch.bfloat16):
                loss = model(**batch).loss
            opt.zero_grad(set_to_none=True)
            loss.backward()
            opt.step()
            stat += torch.stack([loss.detach(), torch.ones_like(loss)])
        dist.all_reduce(stat)
        if rank == 0:
            print(f"epoch {epoch} loss {(stat[0] / stat[1]).item():.4f}")
            model.module.save_pretrained("out")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
