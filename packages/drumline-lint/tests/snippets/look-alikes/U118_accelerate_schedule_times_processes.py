import math

import torch
from accelerate import Accelerator
from accelerate.logging import get_logger
from accelerate.utils import set_seed
from diffusers import DDPMScheduler, UNet2DModel
from diffusers.optimization import get_scheduler
from torch.utils.data import DataLoader

from butterflies.data import ButterflyDataset

logger = get_logger(__name__)
EPOCHS, BATCH, ACCUM, WARMUP = 100, 16, 2, 500


def main():
    accelerator = Accelerator(mixed_precision="fp16", gradient_accumulation_steps=ACCUM,
                              log_with="tensorboard", project_dir="logs")
    accelerator.init_trackers("butterflies")
    set_seed(0, device_specific=True)
    unet = UNet2DModel(sample_size=128, block_out_channels=(128, 128, 256, 256, 512, 512),
                       down_block_types=("DownBlock2D",) * 4 + ("AttnDownBlock2D", "DownBlock2D"),
                       up_block_types=("UpBlock2D", "AttnUpBlock2D") + ("UpBlock2D",) * 4)
    noise_scheduler = DDPMScheduler(num_train_timesteps=1000)
    optimizer = torch.optim.AdamW(unet.parameters(), lr=1e-4)
    loader = DataLoader(ButterflyDataset("/data/butterflies", 128), BATCH, shuffle=True, num_workers=4)

    per_rank = math.ceil(len(loader) / accelerator.num_processes)
    updates = EPOCHS * math.ceil(per_rank / ACCUM)
    lr_scheduler = get_scheduler(
        "cosine", optimizer=optimizer,
        num_warmup_steps=WARMUP * accelerator.num_processes,
        num_training_steps=updates * accelerator.num_processes,
    )
    unet, optimizer, loader, lr_scheduler = accelerator.prepare(unet, optimizer, loader, lr_scheduler)

    step = 0
    for epoch in range(EPOCHS):
        unet.train()
        for clean in loader:
            noise = torch.randn_like(clean)
            t = torch.randint(0, 1000, (clean.size(0),), device=clean.device)
            noisy = noise_scheduler.add_noise(clean, noise, t)
            with accelerator.accumulate(unet):
                loss = torch.nn.functional.mse_loss(unet(noisy, t).sample, noise)
                accelerator.backward(loss)
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(unet.parameters(), 1.0)
                optimizer.step()
                lr_scheduler.step()
                optimizer.zero_grad()
            if accelerator.sync_gradients:
                step += 1
                accelerator.log({"loss": loss.item(), "lr": lr_scheduler.get_last_lr()[0]}, step=step)
        logger.info("epoch %d finished", epoch)
    accelerator.wait_for_everyone()
    if accelerator.is_main_process:
        accelerator.unwrap_model(unet).save_pretrained("butterflies-unet")
    accelerator.end_training()


if __name__ == "__main__":
    main()
