"""A plain DDP script: tags of words, with the best path of tags in every step."""

import torch
from parts import PLANTED, STEPS, TAGS, TagNet, batches, finish, now, sentences, start, tag_loss
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

STAY = 0.3


def best_path_end(word_scores: list[list[float]]) -> float:
    best = word_scores[0]
    for scores in word_scores[1:]:
        best = [
            max(best[before] + STAY * (before == tag) for before in range(TAGS))  # planted
            + scores[tag]
            for tag in range(TAGS)
        ]
    return max(best)


def path_scores(scores: Tensor) -> Tensor:
    """The score of the best path of each sentence."""
    if PLANTED:
        ends = [best_path_end(sentence) for sentence in scores.tolist()]  # planted
        return torch.tensor(ends, device=scores.device)
    stay = STAY * torch.eye(TAGS, device=scores.device)
    best = scores[:, 0]
    for position in range(1, scores.shape[1]):
        best = (best[:, :, None] + stay).amax(1) + scores[:, position]
    return best.amax(1)


def main() -> None:
    device = start()
    model = DistributedDataParallel(TagNet().to(device))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    begin = now()
    for _, (words, tags) in zip(range(STEPS), batches(sentences(4096), 16), strict=False):
        scores = model(words.to(device))
        confidence = path_scores(scores.detach()).mean().sigmoid()
        loss = tag_loss(scores, tags.to(device)) * (1.5 - confidence)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    finish(STEPS, now() - begin)


if __name__ == "__main__":
    main()
