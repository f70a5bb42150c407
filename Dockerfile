# hplm on NVIDIA's Triton container: 24.10, the only one that was tried; others with --build-arg TRITON=25.12 and the like.
#   docker build -t hplm .
#   docker run --rm --gpus 1 --cap-add SYS_NICE --shm-size 1g --stop-timeout 30 -p 127.0.0.1:8000-8002:8000-8002 -v hplm:/data hplm
# Without a GPU leave `--gpus` out. One a container: with more, Triton starts an upper stage on each, with a queue and a host cache
# of its own (nobody tried). The CPU is taken where torch sees no GPU (its driver may be too old): triton.log says which;
# "device": "cuda" in the stages' settings refuses to start instead.
# Whoever reaches these ports controls all tenants: docs/operating.md, "Who may do what"; "In a container" has the rest.
# Load tests run from another machine: pip install 'PATH/TO/hplm[loadtest]' there, then
#   hplm loadtest steady --url grpc://SERVER:8001 --tenants names.txt --text texts.txt
# Not built where this project is tested (no Docker there); each line follows from facts seen on the server itself.
ARG TRITON=24.10
FROM nvcr.io/nvidia/tritonserver:${TRITON}-py3

# Later containers mark their Python as externally managed; this container is ours.
ENV PIP_BREAK_SYSTEM_PACKAGES=1 PIP_NO_CACHE_DIR=1 HPLM_CACHE=/data/cache
COPY . /opt/hplm
# Installed, not put on PYTHONPATH: the 24.10 stub ignores it. numpy < 2 comes with it, which 24.10 needs.
RUN pip install '/opt/hplm[client,serve,build,postgres]'

# The demo is built here on the first start; to serve your own, mount the folder that has models and store, and pass --models.
WORKDIR /data
EXPOSE 8000 8001 8002
ENTRYPOINT ["hplm", "serve", "--host", "0.0.0.0"]
