import functools

import torch
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP, MixedPrecision
from torch.distributed.fsdp.wrap import transformer_auto_wrap_policy
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset
from transformers import AutoModelForCausalLM
from transformers.models.gpt_neox.modeling_gpt_neox import GPTNeoXLayer

from env import launch, reduce_mean
from losses import dpo_loss, sequence_logp

NAME = "EleutherAI/pythia-1.4b"


def wrap(model, env):
    policy = functools.partial(transformer_auto_wrap_policy, transformer_layer_cls={GPTNeoXLayer})
    mp = MixedPrecision(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    return FSDP(model, auto_wrap_policy=policy, mixed_precision=mp, device_id=env.device, use_orig_params=True)


def logps(model, ids, labels):
    return sequence_logp(model(input_ids=ids).logits, labels)


def train(env):
    torch.manual_seed(0)
    policy = wrap(AutoModelForCausalLM.from_pretrained(NAME), env)
    ref = wrap(AutoModelForCausalLM.from_pretrained(NAME).requires_grad_(False), env).eval()
    blob = torch.load("data/pairs.pt", map_location="cpu", weights_only=True)
    data = TensorDataset(blob["chosen"], blob["chosen_labels"], blob["rejected"], blob["rejected_labels"])
    sampler = DistributedSampler(data, drop_last=True)
    loader = DataLoader(data, batch_size=4, sampler=sampler, drop_last=True)
    optimizer = torch.optim.AdamW(policy.parameters(), lr=5e-7)

    for epoch in range(2):
        sampler.set_epoch(epoch)
        for step, batch in enumerate(loader):
            c, cl, r, rl = (t.to(env.device) for t in batch)
            with torch.no_grad():
                rc, rr = logps(ref, c, cl), logps(ref, r, rl)
            ids, labels = torch.cat([c, r]), torch.cat([cl, rl])
            pc, pr = logps(policy, ids, labels).chunk(2)
            loss, acc = dpo_loss(pc, pr, rc, rr)
            loss.backward()
            norm = torch.nn.utils.clip_grad_norm_(policy.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
            if step % 10 == 0:
                a = reduce_mean(acc.item(), env)
                if env.is_main:
                    print(f"{epoch}.{step} acc {a:.3f} norm {norm.item():.2f}")


if __name__ == "__main__":
    launch(train)
