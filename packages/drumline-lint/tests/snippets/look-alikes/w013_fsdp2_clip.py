"""FSDP2 pretraining of an encoder. torchrun --nnodes=1 --nproc_per_node=8 encoder.py"""
import os

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.nn.functional as F
from torch.distributed.checkpoint.state_dict import get_model_state_dict
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.utils.data import DataLoader
from torch.utils.data.distributed import DistributedSampler

from genome import MaskedGenome, build_encoder

EPOCHS, MAX_NORM = 2, 0.5


def main():
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("nccl")

    genome = MaskedGenome("/data/hg38", length=8192)
    sampler = DistributedSampler(genome, drop_last=True)
    loader = DataLoader(genome, batch_size=4, sampler=sampler, num_workers=4, drop_last=True)

    torch.manual_seed(0)
    model = build_encoder(layers=32, width=2048)
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for layer in model.layers:
        fully_shard(layer, mp_policy=policy)
    fully_shard(model, mp_policy=policy)
    optimizer = torch.optim.AdamW(model.parameters(), lr=4e-4, betas=(0.9, 0.95))

    for epoch in range(EPOCHS):
        sampler.set_epoch(epoch)
        for step, (bases, labels) in enumerate(loader):
            logits = model(bases.cuda(non_blocking=True))
            loss = F.cross_entropy(logits.flatten(0, 1).float(), labels.cuda().flatten(), ignore_index=-100)
            loss.backward()
            total_norm = torch.nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM)
            optimizer.step()
            optimizer.zero_grad()
            if step % 50 == 0:
                norm = total_norm.full_tensor().item()
                if dist.get_rank() == 0:
                    print(f"{epoch} {step} loss {loss.item():.4f} norm {norm:.3f}", flush=True)
        dcp.save({"model": get_model_state_dict(model)}, checkpoint_id=f"/ckpt/genome/epoch{epoch}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
