#!/bin/bash
set -euo pipefail
CONFIG=${1:?config}
NAME=$(basename "$CONFIG" .yaml)
WORK=$HOME/runs/$NAME
mkdir -p "$WORK"

if tmux has-session -t "=$NAME" 2>/dev/null; then
    echo "session $NAME exists already" >&2
    exit 1
fi

tmux new-session -d -s "$NAME" \
    "cd $HOME/flow && source venv/bin/activate && export OMP_NUM_THREADS=4 && \
     torchrun --standalone --nproc_per_node=4 train.py --config $CONFIG --out $WORK > $WORK/train.log 2>&1; \
     echo exit \$? >> $WORK/train.log"

echo "attach with: tmux attach -t $NAME"
