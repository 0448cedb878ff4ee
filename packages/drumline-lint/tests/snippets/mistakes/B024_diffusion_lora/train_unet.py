import argparse
import os

import torch
import torch.nn.functional as F
from accelerate import Accelerator, DeepSpeedPlugin
from accelerate.utils import set_seed
from data import CaptionedImages, collate
from diffusers import AutoencoderKL, DDPMScheduler, UNet2DConditionModel
from torch.utils.data import DataLoader
from transformers import CLIPTextModel, CLIPTokenizer


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--base", default="stable-diffusion-v1-5/stable-diffusion-v1-5")
    ap.add_argument("--data", default="data/pets")
    ap.add_argument("--out", default="out")
    ap.add_argument("--max-steps", type=int, default=20_000)
    ap.add_argument("--ckpt-steps", type=int, default=500)
    args = ap.parse_args()

    plugin = DeepSpeedPlugin(zero_stage=2, gradient_accumulation_steps=4)
    accelerator = Accelerator(mixed_precision="bf16", deepspeed_plugin=plugin, gradient_accumulation_steps=4)
    set_seed(10, device_specific=True)

    tok = CLIPTokenizer.from_pretrained(args.base, subfolder="tokenizer")
    text = CLIPTextModel.from_pretrained(args.base, subfolder="text_encoder").requires_grad_(False)
    vae = AutoencoderKL.from_pretrained(args.base, subfolder="vae").requires_grad_(False)
    unet = UNet2DConditionModel.from_pretrained(args.base, subfolder="unet")
    noise_sched = DDPMScheduler.from_pretrained(args.base, subfolder="scheduler")
    loader = DataLoader(CaptionedImages(args.data, tok), 4, shuffle=True, collate_fn=collate, num_workers=4)
    opt = torch.optim.AdamW(unet.parameters(), lr=1e-5)
    unet, opt, loader = accelerator.prepare(unet, opt, loader)
    text.to(accelerator.device, torch.bfloat16)
    vae.to(accelerator.device, torch.bfloat16)

    step = 0
    while step < args.max_steps:
        for batch in loader:
            with accelerator.accumulate(unet):
                with torch.no_grad():
                    lat = vae.encode(batch["pixel_values"].to(torch.bfloat16)).latent_dist.sample()
                    lat = lat * vae.config.scaling_factor
                    cond = text(batch["input_ids"])[0]
                noise = torch.randn_like(lat)
                t = torch.randint(0, noise_sched.config.num_train_timesteps, (len(lat),), device=lat.device)
                pred = unet(noise_sched.add_noise(lat, noise, t), t, cond).sample
                loss = F.mse_loss(pred.float(), noise.float())
                accelerator.backward(loss)
                opt.step()
                opt.zero_grad()
            if accelerator.sync_gradients:
                step += 1
                if step % args.ckpt_steps == 0:
                    if accelerator.is_main_process:
                        accelerator.save_state(os.path.join(args.out, f"checkpoint-{step}"))
                if step >= args.max_steps:
                    break
    accelerator.end_training()


if __name__ == "__main__":
    main()
