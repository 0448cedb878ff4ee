# One-host training image; the processes never leave the container.
#   docker run --rm --gpus '"device=0,1,2,3"' --ipc=host -v /srv/ocr:/data ocr-train
FROM nvcr.io/nvidia/pytorch:24.10-py3

WORKDIR /opt/ocr
COPY requirements.txt setup.py ./
COPY ocr/ ocr/
COPY train.py conf.yaml ./
RUN pip install --no-cache-dir -r requirements.txt && pip install --no-cache-dir .

# the container has no other interface when it is started with --network none
ENV NCCL_SOCKET_IFNAME=lo \
    GLOO_SOCKET_IFNAME=lo \
    CUDA_VISIBLE_DEVICES=0,1,2,3 \
    OMP_NUM_THREADS=4 \
    PYTHONUNBUFFERED=1

VOLUME ["/data"]
ENTRYPOINT ["torchrun", "--nnodes=1", "--nproc_per_node=4", "--master_addr=127.0.0.1", "--master_port=29500", "train.py"]
CMD ["--config", "conf.yaml", "--data", "/data"]
