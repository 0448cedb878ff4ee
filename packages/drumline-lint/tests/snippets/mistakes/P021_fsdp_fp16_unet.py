import os
import random
import hydra
import numpy as np
import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from omegaconf import DictConfig
from torch.cuda.amp import GradScaler
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP
from torch.distributed.fsdp import FullStateDictConfig, MixedPrecision, StateDictType
from torch.distributed.fsdp.wrap import size_based_auto_wrap_policy
from torch.utils.data import DataLoader, DistributedSampler, Dataset
from functools import partial


class Volumes(Dataset):
    """3D patches stored one per npy file."""

    def __init__(self, folder, patch):
        self.paths = sorted(os.path.join(folder, f) for f in os.listdir(folder) if f.endswith("_img.npy"))
        self.patch = patch

    def __len__(self):
        return len(self.paths)

    def __getitem__(self, i):
        img = np.load(self.paths[i], mmap_mode="r")
        seg = np.load(self.paths[i].replace("_img", "_seg"), mmap_mode="r")
        z, y, x = (random.randint(0, s - self.patch) for s in img.shape)
        sl = np.s_[z:z + self.patch, y:y + self.patch, x:x + self.patch]
        return torch.from_numpy(img[sl].copy()).float()[None], torch.from_numpy(seg[sl].copy()).long()


def conv(i, o):
    return nn.Sequential(nn.Conv3d(i, o, 3, padding=1), nn.InstanceNorm3d(o, affine=True), nn.LeakyReLU(0.01),
                         nn.Conv3d(o, o, 3, padding=1), nn.InstanceNorm3d(o, affine=True), nn.LeakyReLU(0.01))


class UNet3D(nn.Module):
    def __init__(self, classes, base=48):
        super().__init__()
        w = [base * 2 ** k for k in range(4)]
        self.downs = nn.ModuleList(conv(a, b) for a, b in zip([1] + w[:-1], w))
        self.ups = nn.ModuleList(nn.ConvTranspose3d(b, a, 2, 2) for a, b in zip(w[:-1][::-1], w[1:][::-1]))
        self.fuse = nn.ModuleList(conv(2 * a, a) for a in w[:-1][::-1])
        self.out = nn.Conv3d(base, classes, 1)

    def forward(self, x):
        skips = []
        for k, d in enumerate(self.downs):
            x = d(x if k == 0 else F.max_pool3d(x, 2))
            skips.append(x)
        for u, f, s in zip(self.ups, self.fuse, skips[-2::-1]):
            x = f(torch.cat([u(x), s], 1))
        return self.out(x)


@hydra.main(config_path="conf", config_name="unet", version_base=None)
def main(cfg: DictConfig):
    local_rank = int(os.environ["LOCAL_RANK"])
    torch.cuda.set_device(local_rank)
    dist.init_process_group("nccl")
    rank = dist.get_rank()

    ds = Volumes(cfg.data, cfg.patch)
    sampler = DistributedSampler(ds)
    dl = DataLoader(ds, cfg.batch, sampler=sampler, num_workers=cfg.workers, pin_memory=True)

    torch.manual_seed(cfg.seed)
    fp16 = MixedPrecision(param_dtype=torch.float16, reduce_dtype=torch.float16, buffer_dtype=torch.float16)
    model = FSDP(UNet3D(cfg.classes), device_id=local_rank, mixed_precision=fp16,
                 auto_wrap_policy=partial(size_based_auto_wrap_policy, min_num_params=1_000_000))
    opt = torch.optim.AdamW(model.parameters(), lr=cfg.lr)
    scaler = GradScaler()

    for epoch in range(cfg.epochs):
        sampler.set_epoch(epoch)
        model.train()
        total = torch.zeros((), device=local_rank)
        for img, seg in dl:
            img, seg = img.cuda(non_blocking=True), seg.cuda(non_blocking=True)
            loss = F.cross_entropy(model(img).float(), seg)
            opt.zero_grad(set_to_none=True)
            scaler.scale(loss).backward()
            scaler.step(opt)
            scaler.update()
            total += loss.detach()
        dist.all_reduce(total)
        if rank == 0:
            print(f"{epoch}: {total.item() / (len(dl) * dist.get_world_size()):.4f}, scale {scaler.get_scale():.0f}")
        with FSDP.state_dict_type(model, StateDictType.FULL_STATE_DICT, FullStateDictConfig(True, True)):
            state = model.state_dict()
        if rank == 0:
            torch.save(state, cfg.out)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
