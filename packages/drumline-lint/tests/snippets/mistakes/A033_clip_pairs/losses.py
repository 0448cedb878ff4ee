import torch
import torch.distributed as dist
import torch.nn.functional as F


def gather_features(feats):
    out = [torch.zeros_like(feats) for _ in range(dist.get_world_size())]
    dist.all_gather(out, feats)
    return torch.cat(out, dim=0)


def clip_loss(image_feats, text_feats, scale):
    all_image = gather_features(image_feats)
    all_text = gather_features(text_feats)
    logits = scale * all_image @ all_text.t()
    target = torch.arange(len(logits), device=logits.device)
    return 0.5 * (F.cross_entropy(logits, target) + F.cross_entropy(logits.t(), target))
