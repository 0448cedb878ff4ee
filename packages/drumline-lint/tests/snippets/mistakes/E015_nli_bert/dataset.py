import json

from torch.utils.data import DataLoader, Dataset


class NLIPairs(Dataset):
    LABELS = {"entailment": 0, "neutral": 1, "contradiction": 2}

    def __init__(self, path):
        with open(path) as f:
            rows = [json.loads(l) for l in f]
        self.rows = [r for r in rows if r["gold_label"] in self.LABELS]

    def __len__(self):
        return len(self.rows)

    def __getitem__(self, i):
        r = self.rows[i]
        return r["sentence1"], r["sentence2"], self.LABELS[r["gold_label"]]


class Collate:
    def __init__(self, tokenizer, max_len=128):
        self.tok, self.max_len = tokenizer, max_len

    def __call__(self, batch):
        a, b, y = zip(*batch)
        enc = self.tok(list(a), list(b), padding=True, truncation=True,
                       max_length=self.max_len, return_tensors="pt")
        return enc, list(y)


def get_loader(path, tokenizer, batch_size):
    return DataLoader(NLIPairs(path), batch_size=batch_size, shuffle=True,
                      collate_fn=Collate(tokenizer), num_workers=2, drop_last=True)
