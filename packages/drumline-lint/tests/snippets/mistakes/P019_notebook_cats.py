# %% [markdown]
# # Cats vs. dogs on both GPUs of the workstation

# %%
import re
from pathlib import Path

import numpy as np
import PIL.Image
import torch
from accelerate import Accelerator, notebook_launcher
from accelerate.utils import set_seed
from timm import create_model
from torch.optim.lr_scheduler import OneCycleLR
from torch.utils.data import DataLoader, Dataset
from torchvision.transforms import Compose, RandomResizedCrop, Resize, ToTensor

# %%
DATA = Path("/home/jo/data/pets/images")
files = sorted(DATA.glob("*.jpg"))
names = sorted({re.sub(r"_\d+$", "", f.stem) for f in files})
label_of = {n: i for i, n in enumerate(names)}
len(files), len(names)


# %%
class Pets(Dataset):
    def __init__(self, files, tf):
        self.files, self.tf = files, tf

    def __len__(self):
        return len(self.files)

    def __getitem__(self, i):
        img = PIL.Image.open(self.files[i]).convert("RGB")
        return self.tf(img), label_of[re.sub(r"_\d+$", "", self.files[i].stem)]


def get_dls(bs=64):
    order = np.random.default_rng(7).permutation(len(files))
    cut = int(0.8 * len(files))
    tr = [files[i] for i in order[:cut]]
    va = [files[i] for i in order[cut:]]
    return (DataLoader(Pets(tr, Compose([RandomResizedCrop(224, (0.5, 1.0)), ToTensor()])), bs, shuffle=True,
                       num_workers=4, drop_last=True),
            DataLoader(Pets(va, Compose([Resize((224, 224)), ToTensor()])), 2 * bs, num_workers=4))


# %% does one batch go through?
net = create_model("resnet50d", pretrained=True, num_classes=len(names)).cuda()
xb, yb = next(iter(get_dls(8)[0]))
net(xb.cuda()).shape


# %%
def train_loop(mixed_precision="bf16", epochs=5, lr=3e-2 / 25, seed=42):
    set_seed(seed)
    accelerator = Accelerator(mixed_precision=mixed_precision)
    train_dl, val_dl = get_dls()
    model = create_model("resnet50d", pretrained=True, num_classes=len(names))
    for p in model.parameters():
        p.requires_grad = False
    for p in model.get_classifier().parameters():
        p.requires_grad = True
    opt = torch.optim.Adam(model.get_classifier().parameters(), lr=lr)
    sched = OneCycleLR(opt, max_lr=lr, epochs=epochs, steps_per_epoch=len(train_dl))
    model, opt, train_dl, val_dl, sched = accelerator.prepare(model, opt, train_dl, val_dl, sched)

    for epoch in range(epochs):
        model.train()
        for x, y in train_dl:
            loss = torch.nn.functional.cross_entropy(model(x), y)
            accelerator.backward(loss)
            opt.step()
            sched.step()
            opt.zero_grad()
        model.eval()
        hits, n = 0, 0
        for x, y in val_dl:
            with torch.inference_mode():
                pred = model(x).argmax(-1)
            pred, y = accelerator.gather_for_metrics((pred, y))
            hits += (pred == y).sum().item()
            n += len(y)
        accelerator.print(f"epoch {epoch}: accuracy {hits / n:.2%}")


# %%
notebook_launcher(train_loop, ("bf16", 5), num_processes=2)
