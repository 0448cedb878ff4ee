import argparse
import math
import os

import torch
import torch.nn.functional as F
from accelerate import Accelerator
from accelerate.logging import get_logger
from datasets import load_dataset
from diffusers import DDPMPipeline, DDPMScheduler, UNet2DModel
from diffusers.optimization import get_cosine_schedule_with_warmup
from torchvision import transforms as T

logger = get_logger(__name__)


def parse_args():
    p = argparse.ArgumentParser(description="accelerate launch --config_file multi_gpu.yaml train_uncond.py")
    p.add_argument("--dataset", default="huggan/flowers-102-categories")
    p.add_argument("--resolution", type=int, default=64)
    p.add_argument("--train_batch_size", type=int, default=16)
    p.add_argument("--num_epochs", type=int, default=100)
    p.add_argument("--lr", type=float, default=1e-4)
    p.add_argument("--log_every", type=int, default=50)
    p.add_argument("--output_dir", default="ddpm-flowers")
    return p.parse_args()


def main():
    args = parse_args()
    accelerator = Accelerator(mixed_precision="bf16", log_with="tensorboard", project_dir=args.output_dir)
    if accelerator.is_main_process:
        os.makedirs(args.output_dir, exist_ok=True)
    accelerator.init_trackers("uncond", config=vars(args))

    tf = T.Compose([T.Resize(args.resolution), T.CenterCrop(args.resolution), T.RandomHorizontalFlip(),
                    T.ToTensor(), T.Normalize([0.5], [0.5])])
    ds = load_dataset(args.dataset, split="train")
    ds.set_transform(lambda ex: {"input": [tf(im.convert("RGB")) for im in ex["image"]]})
    loader = torch.utils.data.DataLoader(ds, batch_size=args.train_batch_size, shuffle=True, num_workers=4)

    model = UNet2DModel(sample_size=args.resolution, in_channels=3, out_channels=3,
                        block_out_channels=(128, 128, 256, 512),
                        down_block_types=("DownBlock2D", "DownBlock2D", "AttnDownBlock2D", "DownBlock2D"),
                        up_block_types=("UpBlock2D", "AttnUpBlock2D", "UpBlock2D", "UpBlock2D"))
    sched = DDPMScheduler(num_train_timesteps=1000)
    opt = torch.optim.AdamW(model.parameters(), lr=args.lr)
    lr_sched = get_cosine_schedule_with_warmup(
        opt, num_warmup_steps=500 * accelerator.num_processes, num_training_steps=len(loader) * args.num_epochs)
    model, opt, loader, lr_sched = accelerator.prepare(model, opt, loader, lr_sched)

    steps_per_epoch = math.ceil(len(loader))
    global_step = 0
    for epoch in range(args.num_epochs):
        model.train()
        for batch in loader:
            clean = batch["input"]
            noise = torch.randn_like(clean)
            t = torch.randint(0, 1000, (clean.shape[0],), device=clean.device)
            noisy = sched.add_noise(clean, noise, t)
            loss = F.mse_loss(model(noisy, t).sample, noise)
            accelerator.backward(loss)
            accelerator.clip_grad_norm_(model.parameters(), 1.0)
            opt.step()
            lr_sched.step()
            opt.zero_grad()
            global_step += 1

            if accelerator.is_main_process and global_step % args.log_every == 0:
                avg_loss = accelerator.gather(loss.detach().repeat(clean.shape[0])).mean()
                logger.info(f"step {global_step}/{steps_per_epoch * args.num_epochs} loss {avg_loss.item():.4f}")
                accelerator.log({"loss": avg_loss.item(), "lr": lr_sched.get_last_lr()[0]}, step=global_step)

        accelerator.wait_for_everyone()
        if accelerator.is_main_process and (epoch + 1) % 10 == 0:
            pipe = DDPMPipeline(unet=accelerator.unwrap_model(model), scheduler=sched)
            pipe.save_pretrained(args.output_dir)
    accelerator.end_training()


if __name__ == "__main__":
    main()
