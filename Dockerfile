# hplm on NVIDIA's Triton container. Release 24.10 is the only one that hplm was tried with; --build-arg TRITON=25.12 takes another.
#   docker build -t hplm .
#   docker run --rm --gpus 1 --cap-add SYS_NICE --shm-size 1g --stop-timeout 30 -p 127.0.0.1:8000-8002:8000-8002 -v hplm:/data hplm --keys
# Without a GPU leave `--gpus` out. Give a container one GPU: with more, Triton starts an encode stage on each, with its own queue
# and host cache (not tried). If torch sees no GPU, for example because the driver is too old, the CPU computes; triton.log says
# which. With "device": "cuda" in the stages' settings the stage refuses to start instead.
# Requests need keys, see docs/access.md. With `--insecure` in place of `--keys` a client that reaches these ports controls all
# tenants: docs/operating.md, "Who may do what" and "In a container".
# Run load tests from another machine: pip install 'PATH/TO/hplm[loadtest]' there, then
#   hplm loadtest steady --url grpc://SERVER:8001 --tenants names.txt --text texts.txt
# This file is not built by the project's tests, because they run without Docker. Each line follows from facts seen on the server.
ARG TRITON=24.10
FROM nvcr.io/nvidia/tritonserver:${TRITON}-py3

# Later containers mark their Python as externally managed, so that pip needs PIP_BREAK_SYSTEM_PACKAGES.
ENV PIP_BREAK_SYSTEM_PACKAGES=1 PIP_NO_CACHE_DIR=1 HPLM_CACHE=/data/cache
COPY . /opt/hplm
# hplm is installed, because the stub of 24.10 ignores PYTHONPATH. hplm requires numpy < 2, as 24.10 does.
RUN pip install '/opt/hplm[client,serve,build,postgres]'

# The first start builds the demo here. To serve your own models, mount the folder that has models and store, and pass --models.
WORKDIR /data
EXPOSE 8000 8001 8002
ENTRYPOINT ["hplm", "serve", "--host", "0.0.0.0"]
