import glob
import json
import os

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, IterableDataset, get_worker_info
from transformers import AutoModelForCausalLM, AutoTokenizer


class JsonlStream(IterableDataset):
    def __init__(self, pattern, tokenizer, seq_len=1024):
        self.files = sorted(glob.glob(pattern))
        self.tok = tokenizer
        self.seq_len = seq_len

    def __iter__(self):
        info = get_worker_info()
        wid, n = (info.id, info.num_workers) if info else (0, 1)
        buf = []
        for path in self.files[wid::n]:
            with open(path) as f:
                for line in f:
                    buf.extend(self.tok(json.loads(line)["text"])["input_ids"])
                    while len(buf) >= self.seq_len:
                        yield torch.tensor(buf[: self.seq_len])
                        buf = buf[self.seq_len:]


def main():
    dist.init_process_group("nccl")
    rank = dist.get_rank()
    local_rank = int(os.environ["LOCAL_RANK"])
    torch.cuda.set_device(local_rank)

    tok = AutoTokenizer.from_pretrained("/models/gpt2")
    model = AutoModelForCausalLM.from_pretrained("/models/gpt2").cuda()
    model = DDP(model, device_ids=[local_rank])
    opt = torch.optim.AdamW(model.parameters(), lr=6e-5)

    stream = JsonlStream("/data/pile/*.jsonl", tok)
    loader = DataLoader(stream, batch_size=8, num_workers=4, pin_memory=True)

    max_steps = 50_000
    for step, ids in enumerate(loader):
        if step == max_steps:
            break
        ids = ids.cuda(non_blocking=True)
        loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        opt.step()
        opt.zero_grad()
        if rank == 0 and step % 100 == 0:
            print(step, loss.item(), flush=True)

    if rank == 0:
        model.module.save_pretrained("out/gpt2-pile")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
