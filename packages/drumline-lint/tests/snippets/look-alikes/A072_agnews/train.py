import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel as DDP

from distributed_env import open_env
from metrics import Counter
from text_data import eval_loader, train_loader
from text_net import TextNet


@torch.no_grad()
def evaluate(net, loader, device):
    net.eval()
    counter = Counter(device)
    for ids, y in loader:
        counter.add(net(ids.to(device)).argmax(1) == y.to(device))
    return counter.compute()


def main():
    env = open_env(seed=25)
    loader, sampler = train_loader("agnews_train.pt", 256, env)
    val = eval_loader("agnews_val.pt", 512, env)
    model = DDP(TextNet().to(env.device), device_ids=[env.local_rank])
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)
    for epoch in range(8):
        sampler.set_epoch(epoch)
        model.train()
        for ids, y in loader:
            loss = F.cross_entropy(model(ids.to(env.device)), y.to(env.device))
            optimizer.zero_grad(set_to_none=True)
            loss.backward()
            optimizer.step()
        acc = evaluate(model.module, val, env.device)
        if env.rank == 0:
            print(f"epoch {epoch}: accuracy {acc:.4f}")
            torch.save(model.module.state_dict(), "agnews.pt")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
