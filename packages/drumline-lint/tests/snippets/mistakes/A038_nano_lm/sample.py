import torch

from nano import NanoLM


@torch.inference_mode()
def sample(prompt, n=200):
    model = NanoLM().cuda().eval()
    ckpt = torch.load("nano.pt", map_location="cuda", weights_only=True)
    model.load_state_dict(ckpt["model"])
    ids = torch.tensor([prompt], device="cuda")
    for _ in range(n):
        probs = model(ids[:, -256:])[:, -1].softmax(-1)
        ids = torch.cat([ids, torch.multinomial(probs, 1)], dim=1)
    return ids[0].tolist()


if __name__ == "__main__":
    print(sample([1, 2, 3]))
