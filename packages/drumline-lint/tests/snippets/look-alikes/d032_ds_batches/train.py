"""Pretraining on SMILES strings."""
import argparse

import deepspeed
import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, DistributedSampler

from smiles.data import Smiles
from smiles.model import ChemGPT


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--local_rank", type=int, default=-1)
    ap.add_argument("--epochs", type=int, default=4)
    args = deepspeed.add_config_arguments(ap).parse_args()

    deepspeed.init_distributed()
    torch.manual_seed(19)
    model = ChemGPT(layers=24, dim=1536)
    engine, _, _, sched = deepspeed.initialize(args=args, model=model, model_parameters=model.parameters())

    data = Smiles("/data/zinc", length=512)
    sampler = DistributedSampler(data, shuffle=True, drop_last=True)
    loader = DataLoader(data, engine.train_micro_batch_size_per_gpu(), sampler=sampler, num_workers=4, drop_last=True)
    accum = engine.gradient_accumulation_steps()

    for epoch in range(args.epochs):
        sampler.set_epoch(epoch)
        window = 0.0
        for i, ids in enumerate(loader):
            loss = engine(ids.to(engine.device))
            engine.backward(loss)
            window += loss.item() / accum
            boundary = engine.is_gradient_accumulation_boundary()
            engine.step()
            if boundary:
                if dist.get_rank() == 0 and engine.global_steps % 20 == 0:
                    print(f"{engine.global_steps} loss {window:.4f} lr {sched.get_last_lr()[0]:.2e}", flush=True)
                window = 0.0
        engine.save_checkpoint("ckpt", tag=f"e{epoch}", client_state={"epoch": epoch})


if __name__ == "__main__":
    main()
