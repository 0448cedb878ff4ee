"""Masked protein LM with FSDP. srun/torchrun entry: torchrun --nnodes $N --nproc_per_node 8 Q038_fsdp_protein.py"""
import os
from functools import partial

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.distributed.fsdp import (BackwardPrefetch, FullyShardedDataParallel, MixedPrecision, ShardedStateDictConfig,
                                    StateDictType)
import torch.distributed.checkpoint as dcp
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
from torch.utils.data import DataLoader, Dataset, DistributedSampler

AA = "ACDEFGHIKLMNPQRSTVWYX"
PAD, MASK = len(AA), len(AA) + 1


class Uniref(Dataset):
    def __init__(self, fasta, crop=512):
        self.seqs, self.crop = [], crop
        cur = []
        for line in open(fasta):
            if line.startswith(">"):
                if cur:
                    self.seqs.append("".join(cur))
                cur = []
            else:
                cur.append(line.strip())
        self.seqs.append("".join(cur))

    def __len__(self):
        return len(self.seqs)

    def __getitem__(self, i):
        s = self.seqs[i][: self.crop]
        ids = torch.full((self.crop,), PAD)
        ids[: len(s)] = torch.tensor([max(AA.find(c), 0) for c in s])
        return ids


class Block(nn.Module):
    def __init__(self, d, h):
        super().__init__()
        self.layer = nn.TransformerEncoderLayer(d, h, 4 * d, batch_first=True, norm_first=True, activation="gelu")

    def forward(self, x, pad):
        return self.layer(x, src_key_padding_mask=pad)


class ProteinLM(nn.Module):
    def __init__(self, d=2560, layers=36, heads=40):
        super().__init__()
        self.emb = nn.Embedding(len(AA) + 2, d)
        self.blocks = nn.ModuleList([Block(d, heads) for _ in range(layers)])
        self.norm = nn.LayerNorm(d)
        self.head = nn.Linear(d, len(AA))

    def forward(self, ids):
        pad = ids == PAD
        x = self.emb(ids)
        for b in self.blocks:
            x = b(x, pad)
        return self.head(self.norm(x))


def corrupt(ids, p=0.15):
    pick = (torch.rand(ids.shape, device=ids.device) < p) & (ids != PAD)
    target = torch.where(pick, ids, torch.full_like(ids, -100))
    return torch.where(pick, torch.full_like(ids, MASK), ids), target


def save_sharded(model, path):
    with FullyShardedDataParallel.state_dict_type(model, StateDictType.SHARDED_STATE_DICT,
                                                  ShardedStateDictConfig(offload_to_cpu=True)):
        dcp.save({"model": model.state_dict()}, checkpoint_id=path)


def main():
    local_rank = int(os.environ["LOCAL_RANK"])
    torch.cuda.set_device(local_rank)
    dist.init_process_group("nccl")
    rank = dist.get_rank()

    bf16 = MixedPrecision(param_dtype=torch.bfloat16, reduce_dtype=torch.float32, buffer_dtype=torch.bfloat16)
    model = FullyShardedDataParallel(ProteinLM(), auto_wrap_policy=ModuleWrapPolicy({Block}), mixed_precision=bf16,
                                     backward_prefetch=BackwardPrefetch.BACKWARD_PRE, device_id=local_rank,
                                     limit_all_gathers=True, sync_module_states=True)
    opt = torch.optim.AdamW(model.parameters(), lr=4e-4, betas=(0.9, 0.98), weight_decay=0.01)

    ds = Uniref(os.environ.get("FASTA", "/data/uniref50.fasta"))
    sampler = DistributedSampler(ds, drop_last=True)
    loader = DataLoader(ds, 8, sampler=sampler, num_workers=4, pin_memory=True, drop_last=True)

    for epoch in range(5):
        sampler.set_epoch(epoch)
        for step, ids in enumerate(loader):
            x, y = corrupt(ids.cuda(non_blocking=True))
            loss = F.cross_entropy(model(x).flatten(0, 1).float(), y.flatten(), ignore_index=-100)
            opt.zero_grad(set_to_none=True)
            loss.backward()
            gnorm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            opt.step()
            if rank == 0 and step % 50 == 0:
                print(f"{epoch}/{step} loss {loss.item():.3f} gnorm {gnorm.item():.2f}", flush=True)
        save_sharded(model, f"ckpt/epoch{epoch}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
