# Training image for the speech models.
#   docker build -t speech-train .
#   docker run --gpus all --ipc=host -v /srv/speech:/data speech-train --config conf/large.yaml
FROM pytorch/pytorch:2.5.1-cuda12.4-cudnn9-devel

RUN apt-get update && apt-get install -y --no-install-recommends \
        libsndfile1 sox ffmpeg git \
    && rm -rf /var/lib/apt/lists/*

WORKDIR /opt/speech
COPY requirements.txt .
RUN pip install --no-cache-dir -r requirements.txt
COPY . .
RUN pip install --no-cache-dir -e .

ENV PYTHONUNBUFFERED=1 \
    OMP_NUM_THREADS=4 \
    CUDA_VISIBLE_DEVICES=0 \
    NCCL_DEBUG=WARN

VOLUME /data
ENTRYPOINT ["torchrun", "--standalone", "--nproc_per_node=4", "train.py"]
CMD ["--config", "conf/base.yaml"]
