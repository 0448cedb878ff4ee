"""Distil teacher logits (precomputed, top 32 per position) into a dense student."""
import argparse

import deepspeed
import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, DistributedSampler

from student.data import TeacherLogits
from student.model import DenseStudent

ACCUM = 4


def distil_loss(logits, top_ids, top_logp, temperature=2.0):
    logp = torch.log_softmax(logits.float() / temperature, dim=-1)
    picked = logp.gather(-1, top_ids)
    p = torch.softmax(top_logp.float() / temperature, dim=-1)
    return -(p * picked).sum(-1).mean() * temperature**2


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--local_rank", type=int, default=-1)
    ap.add_argument("--epochs", type=int, default=2)
    ap = deepspeed.add_config_arguments(ap)
    args = ap.parse_args()

    deepspeed.init_distributed()
    torch.manual_seed(6)
    net = DenseStudent(layers=16, dim=1024)
    engine, _, _, _ = deepspeed.initialize(args=args, model=net, model_parameters=net.parameters())

    data = TeacherLogits("/data/teacher")
    sampler = DistributedSampler(data, shuffle=True, drop_last=True)
    loader = DataLoader(data, batch_size=engine.train_micro_batch_size_per_gpu(), sampler=sampler,
                        num_workers=4, drop_last=True)

    for epoch in range(args.epochs):
        sampler.set_epoch(epoch)
        for i, (ids, top_ids, top_logp) in enumerate(loader):
            logits = engine(ids.to(engine.device))
            loss = distil_loss(logits, top_ids.to(engine.device), top_logp.to(engine.device))
            engine.backward(loss)
            if (i + 1) % ACCUM == 0:
                engine.step()
            if i % 200 == 0 and dist.get_rank() == 0:
                print(f"epoch {epoch} it {i} loss {loss.item():.4f}", flush=True)
        engine.save_checkpoint("ckpt", tag=f"epoch-{epoch}")


if __name__ == "__main__":
    main()
