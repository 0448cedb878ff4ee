# docker build -t anomaly-train .
# docker run --rm --gpus all --ipc=host -v /data:/data:ro -v /ckpt:/ckpt anomaly-train
FROM nvcr.io/nvidia/pytorch:24.10-py3

WORKDIR /workspace
COPY requirements.txt ./
RUN pip install --no-cache-dir -r requirements.txt
COPY anomaly/ ./anomaly/
COPY train.py ./

ENV PYTHONUNBUFFERED=1 \
    OMP_NUM_THREADS=8 \
    NCCL_DEBUG=WARN

# options of torchrun: one process for each GPU of this machine
ENV PET_STANDALONE=1 \
    PET_NPROC_PER_NODE=gpu

CMD ["torchrun", "train.py", "--data", "/data/mvtec", "--out", "/ckpt/anomaly"]
