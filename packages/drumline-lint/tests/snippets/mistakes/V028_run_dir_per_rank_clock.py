import os
from datetime import datetime

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.nn.functional as F
from torch.distributed.checkpoint.state_dict import get_state_dict
from torch.distributed.fsdp import fully_shard
from torch.utils.data import DataLoader, DistributedSampler

from codegen.data import TokenBlocks
from codegen.model import Transformer


def make_run_dir(base):
    stamp = datetime.now().strftime("%Y%m%d-%H%M%S-%f")
    path = os.path.join(base, stamp)
    os.makedirs(path, exist_ok=True)
    return path


def save(model, optimizer, run_dir, step):
    model_state, optim_state = get_state_dict(model, optimizer)
    dcp.save({"model": model_state, "optim": optim_state},
             checkpoint_id=os.path.join(run_dir, f"step-{step:07d}"))


def main():
    local_rank = int(os.environ["LOCAL_RANK"])
    torch.cuda.set_device(local_rank)
    dist.init_process_group("cpu:gloo,cuda:nccl")
    run_dir = make_run_dir("/lustre/codegen/runs")

    torch.manual_seed(0)
    model = Transformer(layers=32, dim=4096, vocab=49152).cuda()
    for layer in model.layers:
        fully_shard(layer)
    fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4, betas=(0.9, 0.95), weight_decay=0.1)

    dataset = TokenBlocks("/lustre/codegen/tokens", 4096)
    sampler = DistributedSampler(dataset, drop_last=True)
    loader = DataLoader(dataset, 1, sampler=sampler, num_workers=2, pin_memory=True)
    step = 0
    for epoch in range(2):
        sampler.set_epoch(epoch)
        for tokens in loader:
            tokens = tokens.cuda(non_blocking=True)
            logits = model(tokens[:, :-1])
            loss = F.cross_entropy(logits.flatten(0, 1).float(), tokens[:, 1:].flatten())
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
            step += 1
            if step % 2000 == 0:
                save(model, optimizer, run_dir, step)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
