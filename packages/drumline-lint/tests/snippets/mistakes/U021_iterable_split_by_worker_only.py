import glob
import json
import os

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, IterableDataset, get_worker_info
from transformers import BertConfig, BertForMaskedLM, BertTokenizerFast, DataCollatorForLanguageModeling


class JsonlStream(IterableDataset):
    def __init__(self, pattern, tokenizer, max_len=256):
        self.files = sorted(glob.glob(pattern))
        self.tokenizer = tokenizer
        self.max_len = max_len

    def __iter__(self):
        info = get_worker_info()
        files = self.files
        if info is not None:
            files = files[info.id::info.num_workers]
        while True:
            for path in files:
                with open(path) as fh:
                    for line in fh:
                        text = json.loads(line)["text"]
                        yield self.tokenizer(text, truncation=True, max_length=self.max_len,
                                             return_special_tokens_mask=True)


def main():
    dist.init_process_group("nccl")
    local_rank = int(os.environ["LOCAL_RANK"])
    torch.cuda.set_device(local_rank)

    tok = BertTokenizerFast.from_pretrained("bert-base-uncased")
    stream = JsonlStream("/data/pile/*.jsonl", tok)
    loader = DataLoader(stream, batch_size=32, num_workers=4,
                        collate_fn=DataCollatorForLanguageModeling(tok, mlm_probability=0.15))
    model = DDP(BertForMaskedLM(BertConfig()).cuda(), device_ids=[local_rank])
    optim = torch.optim.AdamW(model.parameters(), lr=1e-4)

    model.train()
    for step, batch in enumerate(loader):
        if step >= 200_000:
            break
        batch = {k: v.cuda(non_blocking=True) for k, v in batch.items()}
        with torch.autocast("cuda", dtype=torch.bfloat16):
            loss = model(**batch).loss
        loss.backward()
        optim.step()
        optim.zero_grad(set_to_none=True)
        if dist.get_rank() == 0:
            if step % 100 == 0:
                print(step, loss.item())
            if step % 10_000 == 0:
                model.module.save_pretrained(f"out/bert-{step}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
