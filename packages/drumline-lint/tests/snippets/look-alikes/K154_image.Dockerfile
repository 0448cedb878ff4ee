FROM pytorch/pytorch:2.5.1-cuda12.4-cudnn9-runtime

RUN apt-get update \
    && apt-get install -y --no-install-recommends libgl1 libglib2.0-0 tini \
    && rm -rf /var/lib/apt/lists/*

WORKDIR /opt/detector
COPY requirements.txt ./
RUN pip install --no-cache-dir -r requirements.txt
COPY detector/ detector/
COPY configs/ configs/

ENV PYTHONUNBUFFERED=1 \
    OMP_NUM_THREADS=4 \
    NCCL_DEBUG=WARN

RUN useradd -m app
USER app

# docker run --gpus all --shm-size=32g -v /data:/data -v /runs:/runs detector
ENTRYPOINT ["tini", "--", "torchrun", "--standalone", "--nproc_per_node=gpu", "-m", "detector.train"]
CMD ["--config", "configs/base.yaml"]
