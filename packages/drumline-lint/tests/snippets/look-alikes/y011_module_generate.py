import os

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler
from transformers import AutoTokenizer, T5ForConditionalGeneration

from dialogs import DialogTurns, make_collate

MODEL = "/models/flan-t5-base"
PROMPTS = ["user: where is my parcel?", "user: can I change my address?"]


@torch.no_grad()
def show_samples(model, tokenizer, device):
    model.eval()
    batch = tokenizer(PROMPTS, return_tensors="pt", padding=True).to(device)
    out = model.module.generate(**batch, max_new_tokens=40, num_beams=4)
    for prompt, reply in zip(PROMPTS, tokenizer.batch_decode(out, skip_special_tokens=True)):
        print(f"  {prompt} -> {reply}", flush=True)


def main():
    local_rank = int(os.environ["LOCAL_RANK"])
    device = torch.device("cuda", local_rank)
    torch.cuda.set_device(device)
    dist.init_process_group("nccl")
    rank = dist.get_rank()

    tokenizer = AutoTokenizer.from_pretrained(MODEL)
    net = T5ForConditionalGeneration.from_pretrained(MODEL).to(device)
    model = DDP(net, device_ids=[local_rank])
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)

    data = DialogTurns("/data/dialogs/train.jsonl")
    sampler = DistributedSampler(data)
    loader = DataLoader(data, batch_size=16, sampler=sampler, num_workers=4,
                        collate_fn=make_collate(tokenizer), drop_last=True)

    for epoch in range(4):
        sampler.set_epoch(epoch)
        model.train()
        for batch in loader:
            batch = {k: v.to(device, non_blocking=True) for k, v in batch.items()}
            loss = model(**batch).loss
            optimizer.zero_grad(set_to_none=True)
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
        if rank == 0:
            print(f"epoch {epoch} loss {loss.item():.4f}", flush=True)
            show_samples(model, tokenizer, device)
            model.module.save_pretrained(f"/ckpt/dialog/epoch{epoch}")
        dist.barrier()

    dist.destroy_process_group()


if __name__ == "__main__":
    main()
