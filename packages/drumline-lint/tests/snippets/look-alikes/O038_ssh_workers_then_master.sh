#!/bin/bash
# run on the head machine (node 0)
set -eo pipefail

HEAD_IP=192.168.1.20
WORKERS="192.168.1.21 192.168.1.22"
PORT=29700
DIR=/shared/work/slam
mkdir -p "$DIR/logs"
PYBIN=/shared/conda/envs/slam/bin

rank=1
for w in $WORKERS; do
    ssh -f "$w" "cd $DIR && OMP_NUM_THREADS=6 nohup $PYBIN/torchrun --nnodes=3 --node_rank=$rank \
        --nproc_per_node=4 --master_addr=$HEAD_IP --master_port=$PORT \
        train_slam.py --cfg tartan.yaml > logs/node$rank.log 2>&1"
    rank=$((rank + 1))
done

cd $DIR
OMP_NUM_THREADS=6 $PYBIN/torchrun --nnodes=3 --node_rank=0 \
    --nproc_per_node=4 --master_addr=$HEAD_IP --master_port=$PORT \
    train_slam.py --cfg tartan.yaml 2>&1 | tee logs/node0.log

$PYBIN/python eval_slam.py --ckpt ckpt/last.pt
