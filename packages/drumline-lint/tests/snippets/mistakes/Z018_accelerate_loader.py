import argparse

import torch
import torch.nn.functional as F
from accelerate import Accelerator
from torch.utils.data import DataLoader

from molgraph import Molecules, GraphTransformer, batch_graphs


def parse_args():
    parser = argparse.ArgumentParser(description="accelerate launch --multi_gpu train.py ...")
    parser.add_argument("--train", required=True)
    parser.add_argument("--valid", required=True)
    parser.add_argument("--epochs", type=int, default=40)
    parser.add_argument("--out", default="graph.pt")
    return parser.parse_args()


def main():
    args = parse_args()
    accelerator = Accelerator(mixed_precision="bf16")
    device = accelerator.device

    train_loader = DataLoader(Molecules(args.train), batch_size=128, shuffle=True,
                              collate_fn=batch_graphs, num_workers=4)
    valid_loader = DataLoader(Molecules(args.valid), batch_size=256,
                              collate_fn=batch_graphs, num_workers=4)
    model = GraphTransformer(dim=256, layers=8)
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-4)

    model, optimizer, valid_loader = accelerator.prepare(model, optimizer, valid_loader)

    for epoch in range(args.epochs):
        model.train()
        for graphs, target in train_loader:
            graphs, target = graphs.to(device), target.to(device)
            loss = F.l1_loss(model(graphs), target)
            optimizer.zero_grad()
            accelerator.backward(loss)
            optimizer.step()

        model.eval()
        errors = []
        for graphs, target in valid_loader:
            with torch.no_grad():
                error = (model(graphs) - target).abs()
            errors.append(accelerator.gather_for_metrics(error))
        mae = torch.cat(errors).mean().item()
        accelerator.print(f"epoch {epoch}: valid MAE {mae:.4f}")

    accelerator.wait_for_everyone()
    accelerator.save(accelerator.unwrap_model(model).state_dict(), args.out)


if __name__ == "__main__":
    main()
