"""Self-improvement loop: sample with the bare model, learn through the wrapped one.

torchrun --nproc_per_node=8 rollout_module.py
"""
import os

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler
from datasets import load_from_disk
from transformers import AutoModelForCausalLM


@torch.no_grad()
def sample(model, prompts):
    return model.module.generate(prompts, max_new_tokens=64, do_sample=True)


def reward(ids):
    return (ids == 13).float().mean(-1)


def main():
    dist.init_process_group("nccl")
    local_rank = int(os.environ["LOCAL_RANK"])
    torch.cuda.set_device(local_rank)
    torch.manual_seed(dist.get_rank())
    model = DDP(AutoModelForCausalLM.from_pretrained("/models/chat-1b").cuda(), device_ids=[local_rank])
    opt = torch.optim.AdamW(model.module.parameters(), lr=1e-6)
    data = load_from_disk("/data/prompts").with_format("torch")
    sampler = DistributedSampler(data, drop_last=True)
    loader = DataLoader(data, batch_size=8, sampler=sampler, drop_last=True)
    for epoch in range(2):
        sampler.set_epoch(epoch)
        for batch in loader:
            ids = sample(model, batch["input_ids"].cuda())
            logp = torch.log_softmax(model(input_ids=ids).logits[:, :-1].float(), dim=-1)
            logp = logp.gather(-1, ids[:, 1:, None]).squeeze(-1).sum(-1)
            loss = -(reward(ids) * logp).mean()
            opt.zero_grad(set_to_none=True)
            loss.backward()
            opt.step()
    if dist.get_rank() == 0:
        model.module.save_pretrained("/models/chat-1b-rl")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
