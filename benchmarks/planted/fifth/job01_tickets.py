"""A plain DDP script: messages to a help desk, as text, which the collate function tokenises."""

import random
import re

import torch
import torch.distributed as dist
from parts import (
    DEPARTMENTS,
    PLANTED,
    STEPS,
    TICKET_LENGTH,
    TOKENS,
    TicketNet,
    batches,
    finish,
    now,
    start,
)
from torch import Tensor
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel

WORDS = ["printer", "password", "invoice", "broken", "since", "monday", "please", "help", "screen"]
MASKS = [
    (r"<[^>]+>", " "),
    (r"https?://\S+", " link "),
    (r"[\w.]+@[\w.]+", " mail "),
    (r"\b\d{2}[.:]\d{2}\b", " time "),
    (r"\d+", " number "),
    (r"[^a-z ]+", " "),
    (r"\s+", " "),
]

Sample = tuple[str, Tensor, int]


def messages(count: int) -> list[str]:
    choose = random.Random(1)
    texts = []
    for number in range(count):
        words = " ".join(choose.choices(WORDS, k=600))
        texts.append(f"<p>Order {number}, 10:45, see https://desk.example/{number}</p> {words}!")
    return texts


def tokenise(text: str) -> list[int]:
    """Masks what varies, and gives each piece of three letters a number."""
    text = text.lower()
    for pattern, replacement in MASKS:
        text = re.sub(pattern, replacement, text)  # planted: the same texts in every epoch
    pieces = [piece for word in text.split() for piece in re.findall(r".{1,3}", word)]  # planted
    numbers = [sum(map(ord, piece)) % (TOKENS - 1) + 1 for piece in pieces]  # planted
    return numbers[:TICKET_LENGTH]


def collated(samples: list[Sample]) -> tuple[Tensor, Tensor]:
    if PLANTED:
        tokens = torch.tensor([tokenise(text) for text, _, _ in samples])  # planted
    else:
        tokens = torch.stack([tokens for _, tokens, _ in samples])
    return tokens, torch.tensor([department for _, _, department in samples])


def samples() -> list[Sample]:
    """With tokens only where the job tokenises once."""
    texts = messages(1024)
    empty = torch.zeros(0)
    tokens = [empty if PLANTED else torch.tensor(tokenise(text)) for text in texts]
    return [(text, tokens[i], i % DEPARTMENTS) for i, text in enumerate(texts)]


def main() -> None:
    device = start()
    loader = batches(samples(), 8, collate_fn=collated)
    model = DistributedDataParallel(TicketNet(width=64).to(device))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.001, fused=True)
    begin = now()
    for step, (tokens, departments) in zip(range(STEPS), loader, strict=False):
        loss = functional.cross_entropy(model(tokens.to(device)), departments.to(device))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step % 50 == 49 and dist.get_rank() == 0:
            print(f"step {step}: loss {loss.item():.4f}")
    finish(STEPS, now() - begin)


if __name__ == "__main__":
    main()
