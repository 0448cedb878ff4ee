import torch
import torch.nn.functional as F
from accelerate import Accelerator, DeepSpeedPlugin
from accelerate.utils import set_seed
from checkpoints import CheckpointKeeper
from diffusers import DDPMScheduler, UNet2DModel
from torch.utils.data import DataLoader
from torchvision import datasets, transforms


def main(steps=100_000, every=2000):
    accelerator = Accelerator(mixed_precision="bf16", deepspeed_plugin=DeepSpeedPlugin(zero_stage=2))
    set_seed(1, device_specific=True)
    tf = transforms.Compose([transforms.Resize((64, 64)), transforms.ToTensor(), transforms.Normalize(0.5, 0.5)])
    loader = DataLoader(datasets.ImageFolder("data/cars", tf), 32, shuffle=True, num_workers=4, drop_last=True)
    unet = UNet2DModel(64, 3, 3)
    opt = torch.optim.AdamW(unet.parameters(), lr=1e-4)
    unet, opt, loader = accelerator.prepare(unet, opt, loader)
    noise = DDPMScheduler(num_train_timesteps=1000)
    keeper = CheckpointKeeper(accelerator, "ckpt")
    step = 0
    while step < steps:
        for x, _ in loader:
            eps = torch.randn_like(x)
            t = torch.randint(0, 1000, (len(x),), device=x.device)
            loss = F.mse_loss(unet(noise.add_noise(x, eps, t), t).sample.float(), eps)
            accelerator.backward(loss)
            opt.step()
            opt.zero_grad()
            step += 1
            if step % every == 0:
                mean = accelerator.gather(loss.detach()).mean().item()
                accelerator.print(f"step {step} loss {mean:.4f}")
                keeper.save(step)
            if step == steps:
                break
    accelerator.end_training()


if __name__ == "__main__":
    main()
