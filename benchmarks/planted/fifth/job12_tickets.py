"""A plain DDP script: tickets, with a thread that writes the log."""

import io
import queue
import threading
import time

from parts import PLANTED, STEPS, TicketNet, batches, finish, now, start, tickets
from torch import optim
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel


class Writer(threading.Thread):
    """Writes lines while the loop goes on."""

    def __init__(self) -> None:
        super().__init__(daemon=True)
        self.lines: queue.SimpleQueue[str] = queue.SimpleQueue()
        self.file = io.StringIO()
        self.ended = False

    def run(self) -> None:
        while not self.ended:
            if self.lines.empty():  # planted: asks again at once, and holds the interpreter
                if not PLANTED:
                    time.sleep(0.05)
                continue
            self.file.write(self.lines.get() + "\n")


def main() -> None:
    device = start()
    writer = Writer()
    writer.start()  # planted
    model = DistributedDataParallel(TicketNet(width=64).to(device))
    optimizer = optim.AdamW(model.parameters(), lr=0.001, fused=True)

    # Lines are rare.
    begin = now()
    for step, (tokens, departments) in zip(range(STEPS), batches(tickets(4096), 24), strict=False):
        loss = functional.cross_entropy(model(tokens.to(device)), departments.to(device))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step % 20 == 19:
            writer.lines.put(f"step {step}: loss {loss.item():.4f}")
    finish(STEPS, now() - begin)
    writer.ended = True


if __name__ == "__main__":
    main()
