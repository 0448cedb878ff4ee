"""Answers with what a model says: one process, one GPU, batches of requests that came at about the same time."""

import argparse
import json
import logging
import queue
import threading
import time
from concurrent.futures import Future
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import torch
from torch import nn

log = logging.getLogger("serve")


class Batcher(threading.Thread):
    def __init__(self, model, device, largest=32, patience=0.005):
        super().__init__(daemon=True)
        self.model = model
        self.device = device
        self.largest = largest
        self.patience = patience
        self.waiting = queue.Queue()

    def ask(self, features):
        answer = Future()
        self.waiting.put((features, answer))
        return answer.result(timeout=5)

    def gather(self):
        batch = [self.waiting.get()]
        deadline = time.monotonic() + self.patience
        while len(batch) < self.largest:
            try:
                batch.append(self.waiting.get(timeout=max(deadline - time.monotonic(), 0)))
            except queue.Empty:
                break
        return batch

    @torch.inference_mode()
    def run(self):
        while True:
            batch = self.gather()
            inputs = torch.tensor([features for features, _ in batch]).pin_memory().to(self.device)
            scores = self.model(inputs).softmax(dim=1)
            for (_, answer), row in zip(batch, scores):
                answer.set_result({"class": row.argmax().item(), "score": row.max().item()})
            print(f"answered {len(batch)}")


def load(path, device):
    model = nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.BatchNorm1d(64), nn.Linear(64, 3))
    if path:
        checkpoint = torch.load(path)
        model.load_state_dict({name.removeprefix("module."): value for name, value in checkpoint["model"].items()})
    return model.to(device).eval()


def handler_for(batcher):
    class Handler(BaseHTTPRequestHandler):
        def do_POST(self):
            length = int(self.headers["Content-Length"])
            try:
                features = [float(value) for value in json.loads(self.rfile.read(length))]
            except ValueError:
                self.send_error(400)
                return
            body = json.dumps(batcher.ask(features)).encode()
            self.send_response(200)
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, form, *args):
            log.info(form, *args)

    return Handler


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--weights")
    parser.add_argument("--port", type=int, default=8080)
    parser.add_argument("--device", default="cuda:0")
    args = parser.parse_args()
    logging.basicConfig(level=logging.INFO)
    torch.cuda.set_device(0)
    batcher = Batcher(load(args.weights, args.device), args.device)
    batcher.start()
    print(f"listening on {args.port}")
    ThreadingHTTPServer(("127.0.0.1", args.port), handler_for(batcher)).serve_forever()


if __name__ == "__main__":
    main()
