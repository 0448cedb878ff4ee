"""A recurrent language model with a second head that guesses the token after the next."""

import torch.nn as nn
import torch.nn.functional as F


class LanguageModel(nn.Module):
    def __init__(self, vocabulary=64, width=64):
        super().__init__()
        self.embed = nn.Embedding(vocabulary, width)
        self.rnn = nn.LSTM(width, width, num_layers=2, batch_first=True, dropout=0.1)
        self.next_head = nn.Linear(width, vocabulary)
        self.second_head = nn.Linear(width, vocabulary)

    def forward(self, tokens):
        states, _ = self.rnn(self.embed(tokens))
        return self.next_head(states), self.second_head(states)


def loss_of(next_logits, second_logits, targets):
    first = F.cross_entropy(next_logits.flatten(0, 1), targets.flatten())
    second = F.cross_entropy(second_logits[:, :-1].flatten(0, 1), targets[:, 1:].flatten())
    return first + 0.3 * second
