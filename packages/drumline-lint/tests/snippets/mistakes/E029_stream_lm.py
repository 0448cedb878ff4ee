import glob
import gzip
import itertools
import os

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, IterableDataset, get_worker_info
from transformers import AutoTokenizer, GPT2Config, GPT2LMHeadModel

STEPS = 100_000


class TextShards(IterableDataset):
    def __init__(self, pattern, tokenizer, block=1024):
        self.files = sorted(glob.glob(pattern))
        self.tok = tokenizer
        self.block = block

    def _docs(self, files):
        for f in itertools.cycle(files):
            with gzip.open(f, "rt") as fh:
                for line in fh:
                    yield line

    def __iter__(self):
        info = get_worker_info()
        if info is None:
            mine = self.files
        else:
            mine = self.files[info.id::info.num_workers]
        buf = []
        for doc in self._docs(mine):
            buf += self.tok(doc)["input_ids"] + [self.tok.eos_token_id]
            while len(buf) >= self.block:
                yield torch.tensor(buf[:self.block])
                buf = buf[self.block:]


def main():
    dist.init_process_group("nccl")
    local = int(os.environ["LOCAL_RANK"])
    torch.cuda.set_device(local)

    tok = AutoTokenizer.from_pretrained("gpt2")
    data = TextShards("/data/openwebtext/*.txt.gz", tok)
    loader = DataLoader(data, batch_size=8, num_workers=4, pin_memory=True)

    model = DDP(GPT2LMHeadModel(GPT2Config()).cuda(), device_ids=[local])
    opt = torch.optim.AdamW(model.parameters(), 3e-4, betas=(0.9, 0.95), weight_decay=0.1)
    sched = torch.optim.lr_scheduler.OneCycleLR(opt, 3e-4, total_steps=STEPS, pct_start=0.02)

    model.train()
    for step, ids in zip(range(STEPS), loader):
        ids = ids.cuda(non_blocking=True)
        with torch.autocast("cuda", dtype=torch.bfloat16):
            loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        opt.step()
        sched.step()
        opt.zero_grad(set_to_none=True)
        if step % 5000 == 0 and dist.get_rank() == 0:
            print(step, loss.item(), flush=True)
            model.module.save_pretrained(f"gpt2-owt/{step}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
