# hplm on NVIDIA's Triton container: 24.10 by default, any later one with --build-arg TRITON=25.12 and the like.
#   docker build -t hplm .
#   docker run --rm --gpus all --cap-add SYS_NICE --shm-size 1g --stop-timeout 30 -p 8000-8002:8000-8002 -v hplm:/data hplm
# The CPU is taken where torch sees no GPU (its driver may be too old): triton.log says which; "device": "cuda" in hbert_upper's
# settings refuses to start instead. Load tests run from another machine: pip install 'hplm[loadtest]' there.
# Not built where this project is tested (no Docker there); each line follows from facts seen on the server itself.
ARG TRITON=24.10
FROM nvcr.io/nvidia/tritonserver:${TRITON}-py3

# Later containers mark their Python as externally managed; this container is ours.
ENV PIP_BREAK_SYSTEM_PACKAGES=1 PIP_NO_CACHE_DIR=1 HPLM_CACHE=/data/cache
COPY . /opt/hplm
# Installed, not put on PYTHONPATH: the 24.10 stub ignores it. numpy < 2 comes with it, which 24.10 needs.
RUN pip install '/opt/hplm[client,serve,build]'

# The demo is built here on the first start; mount your own store and models and pass --models to serve those.
WORKDIR /data
EXPOSE 8000 8001 8002
ENTRYPOINT ["hplm", "serve", "--host", "0.0.0.0"]
