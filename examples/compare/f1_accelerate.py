"""Macro F1 and a confusion matrix of an evaluation set: Accelerate."""

import torch
from accelerate import Accelerator
from accelerate.utils import set_seed
from common import RANKS, Net, show, spirals
from sklearn.metrics import confusion_matrix, f1_score
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader

accelerator = Accelerator()
set_seed(0)
net = Net()
optimizer = torch.optim.AdamW(net.parameters(), lr=0.01)
train_loader = DataLoader(spirals(1000, seed=1), batch_size=64 // RANKS, shuffle=True)
eval_loader = DataLoader(spirals(501, seed=2), batch_size=64 // RANKS)
net, optimizer, train_loader, eval_loader = accelerator.prepare(net, optimizer, train_loader, eval_loader)

for _epoch in range(30):
    net.train()
    for batch in train_loader:
        loss = cross_entropy(net(batch["points"]), batch["labels"])
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()

    net.eval()
    labels, chosen = [], []
    for batch in eval_loader:
        with torch.no_grad():
            scores = net(batch["points"])
        gathered = accelerator.gather_for_metrics((batch["labels"], scores.argmax(1)))
        labels.extend(gathered[0].tolist())
        chosen.extend(gathered[1].tolist())
    f1, matrix = f1_score(labels, chosen, average="macro"), confusion_matrix(labels, chosen)
    accelerator.print(f"f1 {f1:.4f}")

show(accelerator.unwrap_model(net), f1=f1, counted=matrix.sum())
accelerator.end_training()
