"""GPT-2 on clinical notes, 8 GPUs: torchrun --standalone --nproc_per_node=8 finetune.py"""
import os

import numpy as np
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset
from transformers import GPT2LMHeadModel

CONTEXT = 1024
EPOCHS = 3


class Notes(Dataset):
    def __init__(self, path):
        self.tokens = np.load(path, mmap_mode="r")

    def __len__(self):
        return (len(self.tokens) - 1) // CONTEXT

    def __getitem__(self, i):
        chunk = self.tokens[i * CONTEXT:(i + 1) * CONTEXT]
        return torch.from_numpy(chunk.astype(np.int64))


def main():
    dist.init_process_group("nccl")
    rank = dist.get_rank()
    local_rank = int(os.environ["LOCAL_RANK"])
    torch.cuda.set_device(local_rank)
    torch.manual_seed(17)

    data = Notes("/data/notes/train.npy")
    loader = DataLoader(data, batch_size=8, shuffle=True, num_workers=4, pin_memory=True, drop_last=True)

    model = GPT2LMHeadModel.from_pretrained("/models/gpt2").cuda()
    model = DistributedDataParallel(model, device_ids=[local_rank])
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-5)

    step = 0
    for epoch in range(EPOCHS):
        for ids in loader:
            ids = ids.cuda(non_blocking=True)
            with torch.autocast("cuda", dtype=torch.bfloat16):
                loss = model(input_ids=ids, labels=ids).loss
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
            if rank == 0 and step % 50 == 0:
                print(f"{epoch} {step} {loss.item():.3f}", flush=True)
            step += 1

    if rank == 0:
        model.module.save_pretrained("/checkpoints/gpt2-notes")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
