"""Pretraining on protein structures; features are computed once on first use."""
import os
from pathlib import Path

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler

from fold.featurize import featurize_file
from fold.dataset import FeatureStore
from fold.model import StructureEncoder

RAW = Path("/shared/pdb/raw")
FEATURES = Path("/shared/pdb/features")


def prepare_features():
    """All 190k structures; about three hours on one node's CPUs."""
    FEATURES.mkdir(parents=True, exist_ok=True)
    for path in sorted(RAW.glob("*.cif.gz")):
        out = FEATURES / (path.name.split(".")[0] + ".pt")
        if not out.exists():
            tmp = out.with_suffix(".tmp")
            torch.save(featurize_file(path), tmp)
            tmp.rename(out)
    (FEATURES / "DONE").touch()


def setup():
    dist.init_process_group(backend="nccl")
    local = int(os.environ["LOCAL_RANK"])
    torch.cuda.set_device(local)
    return dist.get_rank(), torch.device("cuda", local)


def main():
    rank, device = setup()

    if rank == 0 and not (FEATURES / "DONE").exists():
        prepare_features()
    dist.barrier()

    data = FeatureStore(FEATURES, crop=256)
    sampler = DistributedSampler(data, shuffle=True, seed=9)
    loader = DataLoader(data, batch_size=4, sampler=sampler, num_workers=8, drop_last=True)
    model = DDP(StructureEncoder(dim=384, layers=12).to(device), device_ids=[device.index])
    opt = torch.optim.AdamW(model.parameters(), lr=1e-4)

    for epoch in range(20):
        sampler.set_epoch(epoch)
        model.train()
        for step, batch in enumerate(loader):
            batch = {k: v.to(device, non_blocking=True) for k, v in batch.items()}
            with torch.autocast("cuda", dtype=torch.bfloat16):
                loss = model(batch["residues"], batch["coords"], batch["mask"])
            opt.zero_grad(set_to_none=True)
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            opt.step()
            if rank == 0 and step % 100 == 0:
                print(f"epoch {epoch} step {step} loss {loss.item():.4f}", flush=True)
        if rank == 0:
            torch.save({"model": model.module.state_dict(), "opt": opt.state_dict()}, f"/shared/ckpt/enc-{epoch}.pt")
        dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
