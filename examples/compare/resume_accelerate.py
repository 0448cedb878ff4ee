"""Killed and started again, with dropout and a new order every epoch: Accelerate."""

import torch
from accelerate import Accelerator
from accelerate.utils import DataLoaderConfiguration, set_seed
from common import FOLDER, RANKS, Net, show, spirals
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader

accelerator = Accelerator(dataloader_config=DataLoaderConfiguration(use_seedable_sampler=True))
set_seed(0)
net = Net(dropout=0.1)
optimizer = torch.optim.AdamW(net.parameters(), lr=0.01)
train_loader = DataLoader(spirals(1000, seed=1), batch_size=64 // RANKS, shuffle=True)
net, optimizer, train_loader = accelerator.prepare(net, optimizer, train_loader)

step = max((int(path.name.removeprefix("step_")) for path in FOLDER.glob("step_*")), default=0)
if step:
    accelerator.load_state(FOLDER / f"step_{step}")
for epoch in range(step // len(train_loader), 4):
    net.train()
    train_loader.set_epoch(epoch)
    for batch in accelerator.skip_first_batches(train_loader, step % len(train_loader)):
        loss = cross_entropy(net(batch["points"]), batch["labels"])
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        step += 1
        if step % 20 == 0:
            accelerator.save_state(FOLDER / f"step_{step}")

show(accelerator.unwrap_model(net))
accelerator.end_training()
