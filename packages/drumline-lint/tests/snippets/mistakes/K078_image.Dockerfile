FROM pytorch/pytorch:2.4.0-cuda12.4-cudnn9-runtime

RUN apt-get update && apt-get install -y --no-install-recommends \
        git libsndfile1 tini \
    && rm -rf /var/lib/apt/lists/*

WORKDIR /app
COPY requirements.txt .
RUN pip install --no-cache-dir -r requirements.txt

COPY src/ src/
COPY configs/ configs/

ENV PYTHONUNBUFFERED=1 \
    OMP_NUM_THREADS=4
ENV CUDA_VISIBLE_DEVICES=0,1
ENV NCCL_DEBUG=WARN

VOLUME ["/data", "/runs"]

# run with: docker run --gpus all --ipc=host -v ... tagger
ENTRYPOINT ["tini", "--"]
CMD ["torchrun", "--standalone", "--nproc_per_node=4", \
     "src/train.py", "--config", "configs/tagger.yaml"]
