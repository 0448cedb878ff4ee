import torch
import torch.nn.functional as F

from misc import MetricLogger, is_main_process


def train_one_epoch(model, loader, optimizer, device, epoch):
    model.train()
    log = MetricLogger()
    for images, masks in loader:
        images, masks = images.to(device, non_blocking=True), masks.to(device, non_blocking=True)
        loss = F.binary_cross_entropy_with_logits(model(images), masks)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        log.update(n=images.size(0), loss=loss.item())
    if is_main_process():
        log.synchronize()
        print(f"epoch {epoch}  {log}", flush=True)


@torch.no_grad()
def export_masks(model, loader, device, out):
    model.eval()
    chunks = [model(x.to(device)).sigmoid().half().cpu() for x, _ in loader]
    torch.save(torch.cat(chunks), out)
