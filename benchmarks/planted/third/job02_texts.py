"""A plain DDP script: a small GPT on raw text, with a tokenizer."""

import random
from typing import Any

import torch
from parts import CONTEXT, PLANTED, STEPS, GptNet, batches, finish, now, start, text_loss
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import Dataset

LETTERS = 26
MERGES = 60
DISTINCT = 160


def merge_rules() -> list[tuple[int, int]]:
    letters = random.Random(3)
    return [(letters.randrange(LETTERS), letters.randrange(LETTERS)) for _ in range(MERGES)]


RULES = merge_rules()


def merged(tokens: list[int], pair: tuple[int, int], joined: int) -> list[int]:
    result = []
    position = 0
    while position < len(tokens):
        if tuple(tokens[position : position + 2]) == pair:  # planted: in each rule, each text
            result.append(joined)
            position += 2
        else:
            result.append(tokens[position])
            position += 1
    return result


def encoded(text: str) -> Tensor:
    tokens = [ord(letter) - ord("a") for letter in text]
    for number, pair in enumerate(RULES):
        tokens = merged(tokens, pair, LETTERS + number)  # planted
    return torch.tensor(tokens[: CONTEXT + 1])


class RawTexts(Dataset[Any]):
    def __init__(self) -> None:
        letters = random.Random(4)
        alphabet = [chr(ord("a") + number) for number in range(LETTERS)]
        self.texts = ["".join(letters.choices(alphabet, k=200)) for _ in range(DISTINCT)]
        self.tokens = [] if PLANTED else [encoded(text) for text in self.texts]

    def __len__(self) -> int:
        return 2 * 8 * STEPS

    def __getitem__(self, index: int) -> Any:
        number = index % DISTINCT
        return self.texts[number] if PLANTED else self.tokens[number]


def tokenized(samples: list[Any]) -> Tensor:
    if PLANTED:
        samples = [encoded(text) for text in samples]  # planted: in the collate function
    return torch.stack(samples)


def main() -> None:
    device = start()
    model = DistributedDataParallel(GptNet(width=64).to(device))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.001)
    loader = batches(RawTexts(), 8, collate_fn=tokenized)
    begin = now()
    for tokens in loader:
        tokens = tokens.to(device)
        loss = text_loss(model(tokens[:, :-1]), tokens)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    finish(STEPS, now() - begin)


if __name__ == "__main__":
    main()
