import collections
import json
import os


def iter_lines(path):
    with open(path, encoding="utf-8") as f:
        for line in f:
            line = line.strip()
            if line:
                yield line


def build_vocab(corpus, size):
    counter = collections.Counter()
    for line in iter_lines(corpus):
        counter.update(line.lower().split())
    words = ["<pad>", "<unk>"] + [w for w, _ in counter.most_common(size - 2)]
    return {w: i for i, w in enumerate(words)}


def save_vocab(vocab, path):
    os.makedirs(os.path.dirname(path), exist_ok=True)
    with open(path, "w", encoding="utf-8") as f:
        json.dump(vocab, f)


def load_vocab(path):
    with open(path, encoding="utf-8") as f:
        return json.load(f)
