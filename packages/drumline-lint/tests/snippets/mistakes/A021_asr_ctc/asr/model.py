import torch.nn as nn
import torch.nn.functional as F


class CTCModel(nn.Module):
    def __init__(self, n_mels, vocab):
        super().__init__()
        self.rnn = nn.LSTM(n_mels, 512, num_layers=4, bidirectional=True, batch_first=True)
        self.out = nn.Linear(1024, vocab)

    def forward(self, mels):
        return self.out(self.rnn(mels)[0]).log_softmax(-1)

    def compute_loss(self, mels, mel_lens, text, text_lens):
        logp = self.forward(mels).transpose(0, 1)
        return F.ctc_loss(logp, text, mel_lens, text_lens, zero_infinity=True)
