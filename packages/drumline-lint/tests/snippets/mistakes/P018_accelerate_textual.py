import argparse
import logging
import math

import torch
import torch.nn.functional as F
from accelerate import Accelerator
from accelerate.logging import get_logger
from accelerate.utils import set_seed
from datasets import load_dataset
from diffusers import AutoencoderKL, DDPMScheduler, UNet2DConditionModel
from diffusers.optimization import get_scheduler
from torchvision import transforms
from transformers import CLIPTextModel, CLIPTokenizer

logger = get_logger(__name__, log_level="INFO")


def parse_args():
    p = argparse.ArgumentParser()
    p.add_argument("--pretrained", default="runwayml/stable-diffusion-v1-5")
    p.add_argument("--dataset", default="lambdalabs/naruto-blip-captions")
    p.add_argument("--output_dir", default="sd-naruto")
    p.add_argument("--batch_size", type=int, default=4)
    p.add_argument("--gradient_accumulation_steps", type=int, default=4)
    p.add_argument("--epochs", type=int, default=50)
    p.add_argument("--lr", type=float, default=1e-5)
    p.add_argument("--warmup", type=int, default=500)
    p.add_argument("--seed", type=int, default=42)
    return p.parse_args()


def make_loader(args, tokenizer):
    tf = transforms.Compose([transforms.Resize(512), transforms.CenterCrop(512),
                             transforms.ToTensor(), transforms.Normalize([0.5], [0.5])])

    def prep(ex):
        ids = tokenizer(ex["text"], max_length=77, padding="max_length", truncation=True, return_tensors="pt").input_ids
        return {"pixels": [tf(i.convert("RGB")) for i in ex["image"]], "ids": list(ids)}

    ds = load_dataset(args.dataset, split="train").with_transform(prep)
    return torch.utils.data.DataLoader(ds, shuffle=True, batch_size=args.batch_size, num_workers=4)


def main():
    args = parse_args()
    accelerator = Accelerator(gradient_accumulation_steps=args.gradient_accumulation_steps, mixed_precision="bf16")
    logging.basicConfig(level=logging.INFO)
    set_seed(args.seed, device_specific=True)

    tokenizer = CLIPTokenizer.from_pretrained(args.pretrained, subfolder="tokenizer")
    text_encoder = CLIPTextModel.from_pretrained(args.pretrained, subfolder="text_encoder").requires_grad_(False)
    vae = AutoencoderKL.from_pretrained(args.pretrained, subfolder="vae").requires_grad_(False)
    unet = UNet2DConditionModel.from_pretrained(args.pretrained, subfolder="unet")
    noise_scheduler = DDPMScheduler.from_pretrained(args.pretrained, subfolder="scheduler")

    optimizer = torch.optim.AdamW(unet.parameters(), lr=args.lr)
    loader = make_loader(args, tokenizer)
    unet, optimizer, loader = accelerator.prepare(unet, optimizer, loader)
    text_encoder.to(accelerator.device)
    vae.to(accelerator.device)

    updates_per_epoch = math.ceil(len(loader) / args.gradient_accumulation_steps)
    max_steps = args.epochs * updates_per_epoch
    lr_scheduler = get_scheduler("cosine", optimizer=optimizer, num_warmup_steps=args.warmup,
                                 num_training_steps=max_steps)
    lr_scheduler = accelerator.prepare(lr_scheduler)

    logger.info("training for %d updates", max_steps)
    global_step = 0
    for epoch in range(args.epochs):
        unet.train()
        for batch in loader:
            with accelerator.accumulate(unet):
                with torch.no_grad():
                    latents = vae.encode(batch["pixels"]).latent_dist.sample() * vae.config.scaling_factor
                    cond = text_encoder(batch["ids"])[0]
                noise = torch.randn_like(latents)
                t = torch.randint(0, noise_scheduler.config.num_train_timesteps, (len(latents),), device=latents.device)
                pred = unet(noise_scheduler.add_noise(latents, noise, t), t, cond).sample
                loss = F.mse_loss(pred.float(), noise.float())
                accelerator.backward(loss)
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(unet.parameters(), 1.0)
                optimizer.step()
                lr_scheduler.step()
                optimizer.zero_grad()
            if accelerator.sync_gradients:
                global_step += 1
                if global_step % 50 == 0:
                    logger.info("step %d loss %.4f lr %.2e", global_step, loss.item(), lr_scheduler.get_last_lr()[0])

    accelerator.wait_for_everyone()
    if accelerator.is_main_process:
        accelerator.unwrap_model(unet).save_pretrained(args.output_dir)
    accelerator.end_training()


if __name__ == "__main__":
    main()
