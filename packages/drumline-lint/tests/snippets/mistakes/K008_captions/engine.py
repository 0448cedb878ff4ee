import torch
import torch.distributed as dist


def fit(model, optimizer, loader, epochs):
    for epoch in range(epochs):
        model.train()
        for feats, tokens in loader:
            feats, tokens = feats.cuda(non_blocking=True), tokens.cuda(non_blocking=True)
            logits = model(feats, tokens[:, :-1])
            loss = torch.nn.functional.cross_entropy(
                logits.reshape(-1, logits.size(-1)), tokens[:, 1:].reshape(-1), ignore_index=0)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        if dist.get_rank() == 0:
            torch.save(model.module.state_dict(), f"caption_ep{epoch}.pt")
