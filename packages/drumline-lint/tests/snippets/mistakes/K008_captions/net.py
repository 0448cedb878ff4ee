from torch import nn


class Captioner(nn.Module):
    def __init__(self, vocab=10000, dim=512):
        super().__init__()
        self.proj = nn.Linear(2048, dim)
        self.emb = nn.Embedding(vocab, dim)
        self.rnn = nn.GRU(dim, dim, batch_first=True)
        self.head = nn.Linear(dim, vocab)

    def forward(self, feats, tokens):
        h0 = self.proj(feats).unsqueeze(0)
        y, _ = self.rnn(self.emb(tokens), h0)
        return self.head(y)
