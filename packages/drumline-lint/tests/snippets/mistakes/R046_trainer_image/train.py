import argparse
import os
import signal

import torch
import torch.distributed as dist
import yaml
from torch.nn.parallel import DistributedDataParallel as DDP

from model.data import build_loader
from model.net import build_net

stop = False


def on_sigterm(signum, frame):
    global stop
    stop = True


def save(path, net, opt, step):
    if dist.get_rank() == 0:
        torch.save({"net": net.state_dict(), "opt": opt.state_dict(), "step": step}, path + ".tmp")
        os.replace(path + ".tmp", path)
    dist.barrier()


def main():
    p = argparse.ArgumentParser()
    p.add_argument("--config", required=True)
    p.add_argument("--ckpt-dir", required=True)
    args = p.parse_args()
    with open(args.config) as f:
        cfg = yaml.safe_load(f)
    signal.signal(signal.SIGTERM, on_sigterm)
    dist.init_process_group("nccl")
    local_rank = int(os.environ["LOCAL_RANK"])
    torch.cuda.set_device(local_rank)

    net = build_net(cfg).cuda()
    opt = torch.optim.AdamW(net.parameters(), lr=cfg["lr"])
    path, step = os.path.join(args.ckpt_dir, "last.pt"), 0
    if os.path.exists(path):
        state = torch.load(path, map_location="cpu")
        net.load_state_dict(state["net"])
        opt.load_state_dict(state["opt"])
        step = state["step"]
    model = DDP(net, device_ids=[local_rank])
    loader = build_loader(cfg, dist.get_rank(), dist.get_world_size(), start_step=step)

    for x, y in loader:
        loss = torch.nn.functional.cross_entropy(model(x.cuda()), y.cuda())
        opt.zero_grad(set_to_none=True)
        loss.backward()
        opt.step()
        step += 1
        flag = torch.tensor(int(stop), device="cuda")
        dist.all_reduce(flag, op=dist.ReduceOp.MAX)
        if flag.item() or step % cfg["save_every"] == 0:
            save(path, net, opt, step)
        if flag.item() or step >= cfg["steps"]:
            break
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
