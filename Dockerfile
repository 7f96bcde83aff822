# docker build -t qkv-engine .                            without a GPU: PyTorch's CPU build
# docker build -t qkv-engine --build-arg TORCH_INDEX= .   with NVIDIA GPUs: pip's own index, some gigabytes
FROM python:3.12-slim

# Triton compiles its launchers with a C compiler.
RUN apt-get update && apt-get install -y --no-install-recommends gcc libc6-dev && rm -rf /var/lib/apt/lists/*

ARG TORCH_INDEX=https://download.pytorch.org/whl/cpu
RUN pip install --no-cache-dir ${TORCH_INDEX:+--index-url $TORCH_INDEX} "torch>=2.10"

COPY . /tmp/qkv-engine
RUN pip install --no-cache-dir "/tmp/qkv-engine[serve]" && rm -rf /tmp/qkv-engine

# Models from the Hub are kept in /models.
ENV HF_HOME=/models
RUN useradd --create-home qkv && mkdir /models && chown qkv /models
USER qkv
WORKDIR /home/qkv
VOLUME /models
EXPOSE 8000

HEALTHCHECK --start-period=10m CMD ["python", "-c", "import urllib.request; urllib.request.urlopen('http://127.0.0.1:8000/health')"]
ENTRYPOINT ["qkv-engine"]
CMD ["serve", "--host", "0.0.0.0", "--api-key-file", "/run/secrets/keys"]
