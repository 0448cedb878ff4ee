# Drumline and torch for `drumline launch --kubernetes --image`, without a root user:
#   docker build --target cpu --tag me/drumline:cpu .
#   docker build --target cuda --tag me/drumline:cuda .
# An image of your own begins with `FROM me/drumline:cuda`, and copies its code to /work.
FROM python:3.12.11-slim-bookworm AS base
ENV PIP_NO_CACHE_DIR=1 PIP_DISABLE_PIP_VERSION_CHECK=1
# The user of the pods that drumline launch writes.
RUN useradd --uid 1000 --create-home drumline
WORKDIR /work
COPY constraints.txt /usr/local/share/drumline/

FROM base AS wheel
COPY pyproject.toml README.md LICENSE ./
COPY drumline drumline
RUN pip wheel --no-deps --wheel-dir /wheels .

FROM base AS cpu
# PyPI's own wheel of torch brings the libraries of CUDA.
ARG TORCH_INDEX=https://download.pytorch.org/whl/cpu
RUN pip install --index-url "$TORCH_INDEX" --constraint /usr/local/share/drumline/constraints.txt torch
COPY --from=wheel /wheels /wheels
RUN pip install --constraint /usr/local/share/drumline/constraints.txt "$(echo /wheels/drumline-*.whl)[storage]"
USER 1000:1000
CMD ["drumline", "--help"]

FROM base AS cuda
RUN pip install --constraint /usr/local/share/drumline/constraints.txt torch
COPY --from=wheel /wheels /wheels
RUN pip install --constraint /usr/local/share/drumline/constraints.txt "$(echo /wheels/drumline-*.whl)[storage]"
USER 1000:1000
CMD ["drumline", "--help"]
