"""Forward-only two-stage inference: torchrun --standalone --nproc_per_node=2 K118_pipeline.py"""
import os

import torch
import torch.distributed as dist
from torch import nn

DIM, VOCAB, BATCH = 1024, 32000, 16


def stage(rank):
    torch.manual_seed(0)
    blocks = [nn.TransformerEncoderLayer(DIM, 16, 4 * DIM, batch_first=True) for _ in range(12)]
    mine = blocks[:6] if rank == 0 else blocks[6:]
    return nn.Sequential(*mine).cuda().eval()


@torch.inference_mode()
def main():
    local_rank = int(os.environ["LOCAL_RANK"])
    torch.cuda.set_device(local_rank)
    dist.init_process_group("nccl")
    rank = dist.get_rank()
    assert dist.get_world_size() == 2, "two stages"
    part = stage(rank)
    docs = torch.load("/data/docs_emb.pt", map_location="cpu", mmap=True)
    usable = len(docs) // BATCH * BATCH
    shape = (BATCH, docs.size(1), DIM)
    out = []
    for i in range(0, usable, BATCH):
        if rank == 0:
            h = part(docs[i:i + BATCH].cuda())
            dist.send(h, dst=1)
            pooled = torch.empty(BATCH, DIM, device="cuda")
            dist.recv(pooled, src=1)
            out.append(pooled.cpu())
        else:
            h = torch.empty(shape, device="cuda")
            dist.recv(h, src=0)
            dist.send(part(h).mean(1).contiguous(), dst=0)
    if rank == 0:
        torch.save(torch.cat(out), "doc_vectors.pt")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
