import argparse

import torch
from accelerate import Accelerator
from diffusers import DDPMScheduler, UNet2DModel
from torch.utils.data import DataLoader, TensorDataset


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--images", default="/data/maps64.pt")
    ap.add_argument("--steps", type=int, default=80_000)
    ap.add_argument("--save_every", type=int, default=5000)
    args = ap.parse_args()
    accelerator = Accelerator(mixed_precision="fp16", project_dir="runs/maps")
    unet = UNet2DModel(sample_size=64, in_channels=3, out_channels=3,
                       block_out_channels=(128, 256, 256, 512),
                       down_block_types=("DownBlock2D",) * 3 + ("AttnDownBlock2D",),
                       up_block_types=("AttnUpBlock2D",) + ("UpBlock2D",) * 3)
    noise = DDPMScheduler(num_train_timesteps=1000)
    loader = DataLoader(TensorDataset(torch.load(args.images, map_location="cpu")), 32,
                        shuffle=True, drop_last=True, num_workers=2)
    opt = torch.optim.AdamW(unet.parameters(), lr=1e-4)
    unet, opt, loader = accelerator.prepare(unet, opt, loader)
    step = 0
    unet.train()
    while step < args.steps:
        for (img,) in loader:
            eps = torch.randn_like(img)
            t = torch.randint(0, 1000, (img.size(0),), device=img.device)
            pred = unet(noise.add_noise(img, eps, t), t).sample
            loss = torch.nn.functional.mse_loss(pred, eps)
            accelerator.backward(loss)
            opt.step()
            opt.zero_grad()
            step += 1
            if step % args.save_every == 0:
                accelerator.save_state(f"runs/maps/step{step}")
            if step >= args.steps:
                break
    accelerator.wait_for_everyone()
    if accelerator.is_main_process:
        accelerator.unwrap_model(unet).save_pretrained("runs/maps/unet")


if __name__ == "__main__":
    main()
