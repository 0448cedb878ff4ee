# docker run --gpus all --ipc=host -e NPROC=4 -v /data:/data trainer
FROM pytorch/pytorch:2.4.1-cuda12.4-cudnn9-runtime

RUN apt-get update \
 && apt-get install -y --no-install-recommends git libgl1 \
 && rm -rf /var/lib/apt/lists/*

WORKDIR /app
COPY requirements.txt .
RUN pip install --no-cache-dir -r requirements.txt
COPY src/ ./src/

ENV NPROC=8 \
    OMP_NUM_THREADS=4 \
    PYTHONUNBUFFERED=1

ENTRYPOINT ["torchrun", "--standalone", "--nproc_per_node=${NPROC}", "src/train.py"]
CMD ["--data", "/data", "--epochs", "30"]
