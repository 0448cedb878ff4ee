import torch


@torch.no_grad()
def rmse(model, loader):
    model.eval()
    se = torch.zeros((), device="cuda")
    n = 0
    for past, future in loader:
        diff = model(past.cuda()) - future.cuda()
        se += diff.pow(2).sum()
        n += diff.numel()
    return (se / n).sqrt().item()
