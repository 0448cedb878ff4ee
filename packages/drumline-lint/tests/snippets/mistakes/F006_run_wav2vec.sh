#!/usr/bin/env bash
# Pretrain / fine-tune wav2vec2 on LibriSpeech.
#   stage 0: manifests, stage 1: pretrain, stage 2: CTC fine-tune
set -euo pipefail

stage=0
stop_stage=2
data=/data/LibriSpeech
exp=exp/w2v2_base
nj=8

while [[ $# -gt 0 ]]; do
    case $1 in
        --stage) stage=$2; shift 2 ;;
        --stop-stage) stop_stage=$2; shift 2 ;;
        --exp) exp=$2; shift 2 ;;
        *) echo "unknown option $1" >&2; exit 1 ;;
    esac
done

# GPUs 2 and 3 are taken by the annotation server
export CUDA_VISIBLE_DEVICES=0,1
export OMP_NUM_THREADS=4
mkdir -p "$exp"

if [ "$stage" -le 0 ] && [ "$stop_stage" -ge 0 ]; then
    for part in train-clean-100 train-clean-360 dev-clean; do
        python local/make_manifest.py --nj "$nj" "$data/$part" "manifests/$part.tsv"
    done
fi

if [ "$stage" -le 1 ] && [ "$stop_stage" -ge 1 ]; then
    torchrun --standalone --nproc_per_node=2 pretrain.py \
        --manifests manifests --config conf/base.yaml --out "$exp/pretrain"
fi

if [ "$stage" -le 2 ] && [ "$stop_stage" -ge 2 ]; then
    torchrun --standalone --nproc_per_node=4 finetune_ctc.py \
        --init "$exp/pretrain/last.pt" \
        --manifests manifests \
        --config conf/ctc_100h.yaml \
        --out "$exp/ctc_100h"
fi
