# Training image for the cluster; the operator sets NNODES, NODE_RANK, HEAD and starts one container per node.
FROM nvcr.io/nvidia/pytorch:24.07-py3

WORKDIR /opt/forecast
COPY pyproject.toml README.md ./
COPY forecast ./forecast
RUN pip install --no-cache-dir .

ENV PYTHONUNBUFFERED=1
ENV OMP_NUM_THREADS=6
ENV NCCL_SOCKET_IFNAME=lo
ENV TORCH_NCCL_ASYNC_ERROR_HANDLING=1

RUN useradd --create-home trainer
USER trainer

ENTRYPOINT ["/bin/bash", "-c"]
CMD ["exec torchrun --nnodes=$NNODES --node_rank=$NODE_RANK --nproc_per_node=8 \
      --master_addr=$HEAD --master_port=29400 \
      -m forecast.train --data /mnt/series --out /mnt/runs"]
