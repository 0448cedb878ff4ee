import sys

import torch
from torch.nn.modules.utils import consume_prefix_in_state_dict_if_present

from model import Encoder

state = torch.load("encoder.pt", map_location="cpu")
consume_prefix_in_state_dict_if_present(state, "module.")
enc = Encoder()
enc.load_state_dict(state)
enc.eval()
with torch.no_grad():
    torch.save(enc(torch.load(sys.argv[1])), sys.argv[2])
