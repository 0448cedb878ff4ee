"""accelerate launch --config_file accelerate_fsdp.yaml train_t2i.py --latents /data/latents"""
import argparse
import os

import torch
import torch.nn.functional as F
from accelerate import Accelerator
from accelerate.logging import get_logger
from accelerate.utils import ProjectConfiguration, set_seed
from diffusers import DDPMScheduler, PixArtTransformer2DModel
from torch.utils.data import DataLoader
from tqdm.auto import tqdm

from latents import LatentDataset

logger = get_logger(__name__)


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--latents", required=True)
    ap.add_argument("--out", default="runs/t2i")
    ap.add_argument("--max-steps", type=int, default=50_000)
    ap.add_argument("--save-every", type=int, default=2_000)
    ap.add_argument("--bs", type=int, default=8)
    args = ap.parse_args()

    accelerator = Accelerator(
        gradient_accumulation_steps=4,
        project_config=ProjectConfiguration(project_dir=args.out, total_limit=3),
        log_with="tensorboard",
    )
    set_seed(0, device_specific=True)
    accelerator.init_trackers("t2i")

    net = PixArtTransformer2DModel(sample_size=64, num_layers=28, caption_channels=4096)
    noise = DDPMScheduler(num_train_timesteps=1000)
    loader = DataLoader(LatentDataset(args.latents), args.bs, shuffle=True, num_workers=4, drop_last=True)
    opt = torch.optim.AdamW(net.parameters(), lr=1e-4)
    net, opt, loader = accelerator.prepare(net, opt, loader)

    step = 0
    bar = tqdm(total=args.max_steps, disable=not accelerator.is_local_main_process)
    while step < args.max_steps:
        for lat, cap, mask in loader:
            with accelerator.accumulate(net):
                eps = torch.randn_like(lat)
                t = torch.randint(0, 1000, (lat.size(0),), device=lat.device)
                noisy = noise.add_noise(lat, eps, t)
                out = net(noisy, encoder_hidden_states=cap, encoder_attention_mask=mask, timestep=t,
                          added_cond_kwargs={"resolution": None, "aspect_ratio": None}).sample
                loss = F.mse_loss(out.chunk(2, dim=1)[0].float(), eps.float())
                accelerator.backward(loss)
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(net.parameters(), 1.0)
                opt.step()
                opt.zero_grad()
            if accelerator.sync_gradients:
                step += 1
                bar.update(1)
                accelerator.log({"loss": loss.item()}, step=step)
                if accelerator.is_main_process and step % args.save_every == 0:
                    path = os.path.join(args.out, f"checkpoint-{step}")
                    accelerator.save_state(path)
                    logger.info("saved %s", path)
                if step >= args.max_steps:
                    break
    accelerator.end_training()


if __name__ == "__main__":
    main()
