import functools

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP
from torch.distributed.fsdp import MixedPrecision
from torch.distributed.fsdp.wrap import transformer_auto_wrap_policy

from chat_data import chat_loader
from cluster import join_cluster
from lm import Decoder, LM


def load_model(path):
    model = LM()
    if dist.get_rank() == 0:
        state = torch.load(path, map_location="cpu", mmap=True, weights_only=True)
        model.load_state_dict(state)
    return model


def wrap(model, device):
    policy = functools.partial(transformer_auto_wrap_policy, transformer_layer_cls={Decoder})
    return FSDP(
        model,
        auto_wrap_policy=policy,
        mixed_precision=MixedPrecision(param_dtype=torch.bfloat16, reduce_dtype=torch.float32),
        device_id=device,
        limit_all_gathers=True,
    )


def main():
    device = join_cluster()
    model = wrap(load_model("base_7b.pt"), device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5)
    loader, sampler = chat_loader("chat.pt", 2)
    for epoch in range(2):
        sampler.set_epoch(epoch)
        model.train()
        for ids, labels in loader:
            logits = model(ids.to(device)).float()
            loss = F.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten().to(device), ignore_index=-100)
            loss.backward()
            model.clip_grad_norm_(1.0)
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
