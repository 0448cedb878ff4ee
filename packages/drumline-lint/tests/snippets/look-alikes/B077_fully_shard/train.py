import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_state_dict
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

import comm
from parallel import build


def main():
    local_rank = comm.setup()
    device = torch.device("cuda", local_rank)
    torch.manual_seed(0)
    model = build("meta-llama/Llama-3.2-1B")
    opt = torch.optim.AdamW(model.parameters(), lr=1e-5, betas=(0.9, 0.95))
    data = TensorDataset(torch.load("data/packed.pt", map_location="cpu", weights_only=True))
    sampler = DistributedSampler(data, drop_last=True)
    loader = DataLoader(data, 2, sampler=sampler, drop_last=True)
    for epoch in range(2):
        sampler.set_epoch(epoch)
        model.train()
        for step, (ids,) in enumerate(loader):
            ids = ids.to(device, non_blocking=True)
            loss = model(input_ids=ids, labels=ids).loss
            loss.backward()
            norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            opt.step()
            opt.zero_grad(set_to_none=True)
            if step % 50 == 0:
                grad_norm = norm.full_tensor().item()
                stats = comm.reduce_dict({"loss": loss.item()}, device)
                if comm.is_primary():
                    print(f"{epoch}.{step} {stats} norm {grad_norm:.2f}")
        weights, optim = get_state_dict(model, opt)
        dcp.save({"model": weights, "optim": optim}, checkpoint_id=f"out/epoch{epoch}")
    comm.teardown()


if __name__ == "__main__":
    main()
