import argparse
import math

import torch
import wandb
from accelerate import Accelerator
from accelerate.utils import set_seed
from diffusers import DDPMScheduler, UNet2DModel
from torch.utils.data import DataLoader
from torchvision import datasets, transforms


def parse():
    p = argparse.ArgumentParser()
    p.add_argument("--data", required=True)
    p.add_argument("--size", type=int, default=64)
    p.add_argument("--batch", type=int, default=32)
    p.add_argument("--epochs", type=int, default=100)
    p.add_argument("--lr", type=float, default=1e-4)
    p.add_argument("--project", default="ddpm-flowers")
    return p.parse_args()


def main():
    args = parse()
    accelerator = Accelerator(mixed_precision="fp16")
    set_seed(42, device_specific=True)
    wandb.init(project=args.project, config=vars(args))

    tfm = transforms.Compose([
        transforms.Resize(args.size), transforms.CenterCrop(args.size),
        transforms.ToTensor(), transforms.Normalize([0.5] * 3, [0.5] * 3)])
    loader = DataLoader(datasets.ImageFolder(args.data, tfm), args.batch, shuffle=True,
                        num_workers=4, drop_last=True)
    unet = UNet2DModel(sample_size=args.size, in_channels=3, out_channels=3)
    noise_scheduler = DDPMScheduler(num_train_timesteps=1000)
    optimizer = torch.optim.AdamW(unet.parameters(), lr=args.lr)
    unet, optimizer, loader = accelerator.prepare(unet, optimizer, loader)

    step = 0
    for epoch in range(args.epochs):
        for clean, _ in loader:
            noise = torch.randn_like(clean)
            t = torch.randint(0, 1000, (clean.size(0),), device=clean.device)
            noisy = noise_scheduler.add_noise(clean, noise, t)
            loss = torch.nn.functional.mse_loss(unet(noisy, t).sample, noise)
            accelerator.backward(loss)
            accelerator.clip_grad_norm_(unet.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
            step += 1
            wandb.log({"loss": loss.item(), "log_loss": math.log(loss.item()), "epoch": epoch}, step=step)
        accelerator.wait_for_everyone()
        if accelerator.is_main_process:
            accelerator.unwrap_model(unet).save_pretrained(f"unet/{epoch}")
    wandb.finish()


if __name__ == "__main__":
    main()
