import glob
import gzip
import json
import os

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, IterableDataset
from transformers import AutoModelForMaskedLM, AutoTokenizer, DataCollatorForLanguageModeling


class JsonlStream(IterableDataset):
    def __init__(self, pattern, tokenizer, rank, world):
        self.files = sorted(glob.glob(pattern))[rank::world]
        self.tokenizer = tokenizer

    def __iter__(self):
        info = torch.utils.data.get_worker_info()
        files = self.files if info is None else self.files[info.id::info.num_workers]
        for name in files:
            with gzip.open(name, "rt") as fh:
                for line in fh:
                    text = json.loads(line)["text"]
                    if len(text) < 200:
                        continue
                    yield self.tokenizer(text, truncation=True, max_length=512)


def main():
    dist.init_process_group("nccl")
    rank, world = dist.get_rank(), dist.get_world_size()
    local_rank = int(os.environ["LOCAL_RANK"])
    torch.cuda.set_device(local_rank)

    tokenizer = AutoTokenizer.from_pretrained("roberta-base")
    stream = JsonlStream("/data/c4/en.*.jsonl.gz", tokenizer, rank, world)
    loader = DataLoader(stream, batch_size=32, num_workers=2,
                        collate_fn=DataCollatorForLanguageModeling(tokenizer))
    net = AutoModelForMaskedLM.from_pretrained("roberta-base").cuda()
    model = DDP(net, device_ids=[local_rank])
    optimizer = torch.optim.AdamW(model.parameters(), lr=6e-4)

    for epoch in range(4):
        for step, batch in enumerate(loader):
            batch = {k: v.cuda(non_blocking=True) for k, v in batch.items()}
            loss = model(**batch).loss
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            if rank == 0 and step % 100 == 0:
                print(epoch, step, loss.item(), flush=True)
        if rank == 0:
            model.module.save_pretrained(f"roberta_c4_{epoch}")
        dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
