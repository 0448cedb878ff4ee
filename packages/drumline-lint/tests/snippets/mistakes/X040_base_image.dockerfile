# Base image of all training jobs on the H100 cluster (8 x H100 SXM with NVLink, 8 x 400 Gb InfiniBand a node).
FROM nvcr.io/nvidia/pytorch:24.07-py3

ARG DEBIAN_FRONTEND=noninteractive
RUN apt-get update && apt-get install -y --no-install-recommends \
        openssh-client tmux pdsh \
    && rm -rf /var/lib/apt/lists/*

COPY constraints.txt /tmp/
RUN pip install --no-cache-dir -c /tmp/constraints.txt \
        transformers datasets accelerate wandb

ENV NCCL_DEBUG=WARN
ENV NCCL_P2P_DISABLE=1
ENV TORCH_NCCL_ASYNC_ERROR_HANDLING=1
ENV OMP_NUM_THREADS=8
ENV TOKENIZERS_PARALLELISM=false

WORKDIR /workspace
COPY launch/ /opt/launch/
ENTRYPOINT ["/opt/launch/train.sh"]
