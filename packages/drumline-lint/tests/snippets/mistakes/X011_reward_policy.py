"""Policy-gradient fine-tuning of a chat model on logged rewards.

torchrun --nproc_per_node=8 reward_policy.py
"""
import os

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler
from datasets import load_from_disk
from transformers import AutoModelForCausalLM


def sequence_logprob(model, ids, mask):
    logits = model(input_ids=ids, attention_mask=mask).logits[:, :-1]
    logp = torch.log_softmax(logits.float(), dim=-1)
    token_logp = logp.gather(-1, ids[:, 1:, None]).squeeze(-1)
    return (token_logp * mask[:, 1:]).sum(-1)


def main():
    dist.init_process_group("nccl")
    local_rank = int(os.environ["LOCAL_RANK"])
    torch.cuda.set_device(local_rank)

    model = AutoModelForCausalLM.from_pretrained("/models/chat-1b").cuda()
    model = DDP(model, device_ids=[local_rank])
    policy = model.module if isinstance(model, DDP) else model
    opt = torch.optim.AdamW(policy.parameters(), lr=1e-6)

    data = load_from_disk("/data/rollouts").with_format("torch")
    sampler = DistributedSampler(data, shuffle=True, drop_last=True)
    loader = DataLoader(data, batch_size=4, sampler=sampler)
    for epoch in range(2):
        sampler.set_epoch(epoch)
        for batch in loader:
            ids, mask = batch["input_ids"].cuda(), batch["attention_mask"].cuda()
            reward = batch["reward"].cuda().float()
            loss = -(reward * sequence_logprob(policy, ids, mask)).mean()
            opt.zero_grad(set_to_none=True)
            loss.backward()
            opt.step()
    if dist.get_rank() == 0:
        policy.save_pretrained("/models/chat-1b-rl")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
