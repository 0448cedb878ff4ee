import json


class PredictionWriter:
    """Streams one JSON object per line."""

    def __init__(self, path, flush_every=500):
        self.path = path
        self.flush_every = flush_every
        self.fh = open(path, "w")
        self.n = 0

    def write(self, doc_id, label, score):
        self.fh.write(json.dumps({"id": doc_id, "label": label, "score": round(score, 5)}) + "\n")
        self.n += 1
        if self.n % self.flush_every == 0:
            self.fh.flush()

    def close(self):
        self.fh.close()
