#!/bin/bash
set -e
cd "$(dirname "$0")"
pip install -q "torch>=2.3,<2.6" torchvision

export OMP_NUM_THREADS=4

python -m torch.distributed.launch \
    --nproc_per_node=4 \
    main.py --data ./data --epochs 30
