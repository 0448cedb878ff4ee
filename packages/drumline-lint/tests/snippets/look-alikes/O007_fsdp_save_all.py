import os

import torch
import torch.distributed as dist
from torch.distributed.fsdp import FullStateDictConfig, StateDictType
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP
from torch.utils.data import DataLoader, DistributedSampler
from transformers import AutoModelForCausalLM

from sft.data import Chat, collate


def full_state(model):
    cfg = FullStateDictConfig(offload_to_cpu=True, rank0_only=True)
    with FSDP.state_dict_type(model, StateDictType.FULL_STATE_DICT, cfg):
        return model.state_dict()


def main():
    dist.init_process_group("nccl")
    local_rank = int(os.environ["LOCAL_RANK"])
    torch.cuda.set_device(local_rank)
    model = AutoModelForCausalLM.from_pretrained("/models/mistral-7b")
    model = FSDP(model, device_id=local_rank, use_orig_params=True)
    opt = torch.optim.AdamW(model.parameters(), lr=1e-5)
    ds = Chat("/data/chat.jsonl")
    sampler = DistributedSampler(ds, shuffle=True)
    loader = DataLoader(ds, 1, sampler=sampler, collate_fn=collate, drop_last=True)
    for epoch in range(2):
        sampler.set_epoch(epoch)
        for batch in loader:
            loss = model(**{k: v.cuda() for k, v in batch.items()}).loss
            loss.backward()
            model.clip_grad_norm_(1.0)
            opt.step()
            opt.zero_grad()
        state = full_state(model)
        if dist.get_rank() == 0:
            torch.save(state, f"/ckpt/mistral_{epoch}.pt")
        dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
