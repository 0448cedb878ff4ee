from torch import nn


class Seq2Seq(nn.Module):
    def __init__(self, vocab, dim=512):
        super().__init__()
        self.emb = nn.Embedding(vocab, dim, padding_idx=0)
        self.core = nn.Transformer(dim, 8, 6, 6, 2048, batch_first=True)
        self.head = nn.Linear(dim, vocab)

    def forward(self, src, tgt):
        mask = nn.Transformer.generate_square_subsequent_mask(tgt.size(1)).to(src.device)
        h = self.core(self.emb(src), self.emb(tgt), tgt_mask=mask,
                      src_key_padding_mask=src.eq(0), tgt_key_padding_mask=tgt.eq(0))
        return self.head(h)
