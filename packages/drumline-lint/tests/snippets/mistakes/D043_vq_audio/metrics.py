"""Running means over all processes."""
import torch
import torch.distributed as dist


class Meter:
    def __init__(self, names, device):
        self.names = list(names)
        self.buf = torch.zeros(len(self.names) + 1, device=device, dtype=torch.float64)

    def add(self, **values):
        for i, k in enumerate(self.names):
            self.buf[i] += float(values[k])
        self.buf[-1] += 1

    def means(self):
        """Mean of each value since the last call."""
        out = self.buf.clone()
        dist.all_reduce(out)
        self.buf.zero_()
        return {k: (out[i] / out[-1]).item() for i, k in enumerate(self.names)}

    def line(self, step):
        return f"step {step} " + " ".join(f"{k}={v:.4f}" for k, v in self.means().items())
