import sys
from pathlib import Path

import torch
import torch.distributed as dist

from utils.dist import cleanup, is_main_process


def claim_folder(out, overwrite, device):
    """Rank 0 looks at the disk, everybody acts on the same answer."""
    out = Path(out)
    ok = torch.ones(1, dtype=torch.int32, device=device)
    if is_main_process():
        busy = out.exists() and any(out.iterdir())
        if busy and not overwrite:
            print(f"{out} is not empty", file=sys.stderr)
            ok.zero_()
        else:
            out.mkdir(parents=True, exist_ok=True)
    dist.broadcast(ok, src=0)
    if not ok.item():
        cleanup()
        sys.exit(1)
    return out
