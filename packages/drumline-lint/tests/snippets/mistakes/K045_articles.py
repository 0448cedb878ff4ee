import os

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import DataLoader, Dataset, DistributedSampler
from transformers import AutoModelForMaskedLM


class Articles(Dataset):
    def __init__(self, path):
        self.docs = torch.load(path, map_location="cpu")

    def __len__(self):
        return len(self.docs)

    def __getitem__(self, i):
        return self.docs[i].long()


def mask_tokens(docs, mask_id=50284, pad_id=50283, p=0.15):
    ids = pad_sequence(docs, batch_first=True, padding_value=pad_id)
    real = ids.ne(pad_id)
    pick = (torch.rand(ids.shape) < p) & real
    return ids.masked_fill(pick, mask_id), real.long(), ids.masked_fill(~pick, -100)


def main():
    local_rank = int(os.environ["LOCAL_RANK"])
    torch.cuda.set_device(local_rank)
    dist.init_process_group("nccl")
    ds = Articles("/data/news/docs.pt")
    sampler = DistributedSampler(ds, drop_last=True)
    loader = DataLoader(ds, 16, sampler=sampler, collate_fn=mask_tokens, num_workers=4, drop_last=True)
    model = AutoModelForMaskedLM.from_pretrained("answerdotai/ModernBERT-base").cuda()
    model = DDP(model, device_ids=[local_rank])
    opt = torch.optim.AdamW(model.parameters(), lr=5e-5)
    for epoch in range(2):
        sampler.set_epoch(epoch)
        for ids, real, labels in loader:
            opt.zero_grad(set_to_none=True)
            try:
                loss = model(input_ids=ids.cuda(), attention_mask=real.cuda(), labels=labels.cuda()).loss
                loss.backward()
            except torch.cuda.OutOfMemoryError:
                print(f"OOM on batch of {tuple(ids.shape)}, skipped", flush=True)
                torch.cuda.empty_cache()
                continue
            opt.step()
        if dist.get_rank() == 0:
            model.module.save_pretrained(f"longnews_{epoch}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
