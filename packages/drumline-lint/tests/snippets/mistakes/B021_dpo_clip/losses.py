import torch
import torch.nn.functional as F


def sequence_logp(logits, labels):
    labels = labels[:, 1:].clone()
    keep = labels.ne(-100)
    labels[~keep] = 0
    logp = logits[:, :-1].float().log_softmax(-1).gather(2, labels.unsqueeze(2)).squeeze(2)
    return (logp * keep).sum(-1)


def dpo_loss(policy_chosen, policy_rejected, ref_chosen, ref_rejected, beta=0.1):
    margin = (policy_chosen - ref_chosen) - (policy_rejected - ref_rejected)
    return -F.logsigmoid(beta * margin).mean(), (margin > 0).float().mean()
