"""An average of the weights, evaluated, and early stopping: Accelerate."""

import torch
from accelerate import Accelerator
from accelerate.utils import set_seed
from common import RANKS, Net, show, spirals
from torch.nn.functional import cross_entropy
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torch.utils.data import DataLoader

accelerator = Accelerator()
set_seed(0)
net = Net()
optimizer = torch.optim.AdamW(net.parameters(), lr=0.01)
train_loader = DataLoader(spirals(1000, seed=1), batch_size=64 // RANKS, shuffle=True)
eval_loader = DataLoader(spirals(501, seed=2), batch_size=64 // RANKS)
net, optimizer, train_loader, eval_loader = accelerator.prepare(net, optimizer, train_loader, eval_loader)
average = AveragedModel(accelerator.unwrap_model(net), multi_avg_fn=get_ema_multi_avg_fn(0.9), use_buffers=True)
average.eval()

best, since_best = 0.0, 0
for epoch in range(1, 61):
    net.train()
    for batch in train_loader:
        loss = cross_entropy(net(batch["points"]), batch["labels"])
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        average.update_parameters(accelerator.unwrap_model(net))

    correct = []
    for batch in eval_loader:
        with torch.no_grad():
            right = average(batch["points"]).argmax(1) == batch["labels"]
        correct.append(accelerator.gather_for_metrics(right))
    accuracy = torch.cat(correct).float().mean().item()
    accelerator.print(f"epoch {epoch}: accuracy {accuracy:.4f}")
    best, since_best = (accuracy, 0) if accuracy > best else (best, since_best + 1)
    if since_best == 3:
        break

show(average.module, accuracy=accuracy, epochs=epoch)
accelerator.end_training()
