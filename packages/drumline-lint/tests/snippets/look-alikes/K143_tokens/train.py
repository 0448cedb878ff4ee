import os

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset
from transformers import AutoModelForCausalLM

from optim import make

EPOCHS, ACCUM = 2, 4


def main():
    local_rank = int(os.environ["LOCAL_RANK"])
    torch.cuda.set_device(local_rank)
    dist.init_process_group("nccl")
    ds = TensorDataset(torch.load("/data/med_notes.pt", map_location="cpu"))
    sampler = DistributedSampler(ds, drop_last=True)
    loader = DataLoader(ds, 4, sampler=sampler, num_workers=2, drop_last=True)
    model = AutoModelForCausalLM.from_pretrained("EleutherAI/pythia-160m").cuda()
    model = DDP(model, device_ids=[local_rank])
    windows = len(loader) // ACCUM
    opt, sched = make(model, windows * EPOCHS)
    for epoch in range(EPOCHS):
        sampler.set_epoch(epoch)
        model.train()
        stream = iter(loader)
        for _ in range(windows):
            with model.no_sync():
                for _ in range(ACCUM - 1):
                    ids = next(stream)[0].cuda().long()
                    (model(input_ids=ids, labels=ids).loss / ACCUM).backward()
            ids = next(stream)[0].cuda().long()
            (model(input_ids=ids, labels=ids).loss / ACCUM).backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            opt.step()
            sched.step()
            opt.zero_grad()
        if dist.get_rank() == 0:
            model.module.save_pretrained(f"notes_{epoch}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
