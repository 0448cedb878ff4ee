import os

import torch
import torch.distributed as dist
from torch.distributed.fsdp import FullStateDictConfig, MixedPrecision, StateDictType
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP
from torch.utils.data import DataLoader, DistributedSampler
from transformers import AutoModelForCausalLM

from sft.data import InstructDataset, pad_collate

MODEL = "/models/llama-7b"


def save_model(model, path):
    cfg = FullStateDictConfig(offload_to_cpu=True, rank0_only=True)
    with FSDP.state_dict_type(model, StateDictType.FULL_STATE_DICT, cfg):
        state = model.state_dict()
    torch.save(state, path)


def main():
    dist.init_process_group("nccl")
    rank = dist.get_rank()
    local_rank = int(os.environ["LOCAL_RANK"])
    torch.cuda.set_device(local_rank)

    model = AutoModelForCausalLM.from_pretrained(MODEL, torch_dtype=torch.float32)
    bf16 = MixedPrecision(torch.bfloat16, torch.bfloat16, torch.bfloat16)
    model = FSDP(model, mixed_precision=bf16, device_id=local_rank, use_orig_params=True)
    optim = torch.optim.AdamW(model.parameters(), lr=1e-5)

    ds = InstructDataset("alpaca.json")
    sampler = DistributedSampler(ds, shuffle=True)
    loader = DataLoader(ds, batch_size=2, sampler=sampler, collate_fn=pad_collate, drop_last=True)

    for epoch in range(3):
        sampler.set_epoch(epoch)
        for batch in loader:
            batch = {k: v.cuda() for k, v in batch.items()}
            loss = model(**batch).loss
            loss.backward()
            model.clip_grad_norm_(1.0)
            optim.step()
            optim.zero_grad()
        if rank == 0:
            print("saving epoch", epoch)
            save_model(model, f"out/epoch{epoch}.pt")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
