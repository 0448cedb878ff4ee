"""Vision transformer pretraining with DeepSpeed.

deepspeed --num_gpus 8 train_mae.py --deepspeed_config ds.json --shards /data/in1k
"""
import argparse
import os

import deepspeed
import torch
import torch.distributed as dist
from torch.utils.data import DataLoader
from torch.utils.data.distributed import DistributedSampler
from torchvision import datasets, transforms
from transformers import ViTMAEConfig, ViTMAEForPreTraining, set_seed


def get_args():
    p = argparse.ArgumentParser()
    p.add_argument("--local_rank", type=int, default=int(os.environ.get("LOCAL_RANK", 0)))
    p.add_argument("--shards", required=True)
    p.add_argument("--epochs", type=int, default=400)
    p.add_argument("--out", default="mae")
    p.add_argument("--seed", type=int, default=31)
    return deepspeed.add_config_arguments(p).parse_args()


def main():
    args = get_args()
    deepspeed.init_distributed(dist_backend="nccl")
    torch.cuda.set_device(args.local_rank)
    set_seed(args.seed + dist.get_rank())

    tf = transforms.Compose([
        transforms.RandomResizedCrop(224, scale=(0.2, 1.0)),
        transforms.RandomHorizontalFlip(),
        transforms.ToTensor(),
        transforms.Normalize((0.485, 0.456, 0.406), (0.229, 0.224, 0.225)),
    ])
    data = datasets.ImageFolder(os.path.join(args.shards, "train"), tf)
    model = ViTMAEForPreTraining(ViTMAEConfig(mask_ratio=0.75))
    engine, optimizer, _, _ = deepspeed.initialize(args=args, model=model, model_parameters=model.parameters())
    sampler = DistributedSampler(data, shuffle=True)
    loader = DataLoader(data, engine.train_micro_batch_size_per_gpu(), sampler=sampler, num_workers=10,
                        pin_memory=True, drop_last=True)

    for epoch in range(args.epochs):
        sampler.set_epoch(epoch)
        engine.train()
        for it, (images, _) in enumerate(loader):
            images = images.to(engine.device, non_blocking=True)
            loss = engine(pixel_values=images).loss
            loss.backward()
            engine.step()
            if it % 100 == 0 and dist.get_rank() == 0:
                print(f"epoch {epoch} [{it}/{len(loader)}] loss {loss.item():.4f}")
        engine.save_checkpoint(args.out, tag=f"epoch{epoch}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
