"""Fine-tune a causal language model of Hugging Face on prompts and answers: the loss is per token of the answers.

drumline train examples/finetune_lm.py:FineTune --task.base base --data.dir answers
"""

import json
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.nn.utils.rnn import pad_sequence
from transformers import AutoModelForCausalLM, AutoTokenizer

from drumline import Loss, Task

IGNORED = -100  # a label that does not count: prompts and padding
Sample = tuple[Tensor, Tensor]


class FineTune(Task):
    defaults: ClassVar[dict[str, Any]] = {
        "data.dir": "answers",  # with train.jsonl and eval.jsonl, lines of {"prompt": "...", "answer": "..."}
        "train.epochs": 3,
        "train.batch_size": 16,
        "train.eval_batch_size": 16,
        "optim.name": "adamw",
        "optim.lr": 2e-5,
        "optim.clip_norm": 1.0,
    }

    base: str = "base"
    """The folder of the model and its tokenizer, as `save_pretrained` writes it, or a name on the Hugging Face hub."""
    max_length: int = 512
    """Tokens of a sample; the rest of a longer one is left out."""

    def model(self) -> nn.Module:
        # from_pretrained gives evaluation mode and the type of the file. For speed choose --train.precision bf16.
        return AutoModelForCausalLM.from_pretrained(self.base, dtype=torch.float32).train()

    def train_data(self) -> list[Sample]:
        return self.samples("train.jsonl")

    def eval_data(self) -> list[Sample]:
        return self.samples("eval.jsonl")

    def samples(self, file: str) -> list[Sample]:
        """Tokens and labels of each line."""
        tokenizer = AutoTokenizer.from_pretrained(self.base)
        found = []
        for line in Path(self.config.data.dir, file).read_text().splitlines():
            pair = json.loads(line)
            prompt = tokenizer(pair["prompt"]).input_ids
            answer = [*tokenizer(pair["answer"], add_special_tokens=False).input_ids, tokenizer.eos_token_id]
            tokens, labels = torch.tensor([prompt + answer, [IGNORED] * len(prompt) + answer])[:, : self.max_length]
            found.append((tokens, labels))
        return found

    @staticmethod
    def collate(samples: list[Sample]) -> tuple[dict[str, Tensor], Tensor]:
        """As long as the longest of these samples. Where the mask is 0, the tokens do not matter."""
        tokens, labels = zip(*samples, strict=True)
        inputs = {
            "input_ids": pad_sequence(tokens, batch_first=True),
            "attention_mask": pad_sequence([torch.ones_like(one) for one in tokens], batch_first=True),
        }
        return inputs, pad_sequence(labels, batch_first=True, padding_value=IGNORED)

    def loss(self, model: nn.Module, batch: tuple[dict[str, Tensor], Tensor]) -> Loss:
        inputs, labels = batch
        scores, following = model(**inputs, use_cache=False).logits[:, :-1], labels[:, 1:]
        total = cross_entropy(scores.flatten(0, 1), following.flatten(), ignore_index=IGNORED, reduction="sum")
        # Ranks have different numbers of tokens. With this weight each token counts the same, on any number of ranks.
        return Loss(
            total, weight=(following != IGNORED).sum(), metrics={"accuracy": (scores.argmax(-1) == following).sum()}
        )
