import torch
from torch.nn.modules.utils import consume_prefix_in_state_dict_if_present

from fraud import FraudNet


def load(path="fraud.pt"):
    state = torch.load(path, map_location="cpu", weights_only=True)["model"]
    consume_prefix_in_state_dict_if_present(state, "module.")
    net = FraudNet().eval()
    net.load_state_dict(state)
    return net


@torch.inference_mode()
def score(net, rows):
    return net(torch.as_tensor(rows, dtype=torch.float32)).sigmoid().tolist()
