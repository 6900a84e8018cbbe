# Targets: worker and api serve the starter or exported models and hold no torch; worker-gpu and api-gpu are the same with
# torch and FAISS for GPUs; train trains and clusters, too; triton-cpu is the bundled Triton server, for development and tests
# only. What each may install, with hashes, is in deploy/locks (`make lock`).
# By digest, so that a build is the same tomorrow; where no registry is reached, give a tag that is at hand.
ARG PYTHON_IMAGE=python:3.11-slim-bookworm@sha256:528257d48c1da0dcecc2e725d1ae34498d60c965f1241e39cd6a85a8859bdf84

FROM ${PYTHON_IMAGE} AS project
ENV PIP_NO_CACHE_DIR=1 PIP_DISABLE_PIP_VERSION_CHECK=1
WORKDIR /build
COPY deploy/locks/build.txt ./
RUN python -m venv tools && tools/bin/pip install --require-hashes --only-binary :all: --no-deps -r build.txt
COPY pyproject.toml hatch_build.py README.md LICENSE ./
COPY mlcd mlcd
COPY service service
COPY training training
# An environment of the same place as the one that it is laid over below, so that its command finds the interpreter.
RUN tools/bin/pip wheel --no-deps --no-build-isolation --wheel-dir wheels . \
    && python -m venv --without-pip /opt/mlcd \
    && python -m pip --python /opt/mlcd/bin/python install --no-deps --no-index wheels/*.whl

FROM ${PYTHON_IMAGE} AS packages
ENV PIP_NO_CACHE_DIR=1 PIP_DISABLE_PIP_VERSION_CHECK=1
WORKDIR /locks
RUN python -m venv --without-pip /opt/mlcd

FROM packages AS api-packages
COPY deploy/locks/api.txt ./
RUN python -m pip --python /opt/mlcd/bin/python install --require-hashes --only-binary :all: --no-deps -r api.txt

FROM ${PYTHON_IMAGE} AS runtime
# /var/lib/mlcd is what a container may keep, /data what jobs read and write, /tmp what it may lose; nothing else is
# written.
RUN groupadd --gid 10001 mlcd \
    && useradd --uid 10001 --gid mlcd --home-dir /tmp --no-create-home --shell /usr/sbin/nologin mlcd \
    && install --directory --owner mlcd --group mlcd /var/lib/mlcd /data
COPY deploy/ready.py /opt/
ENV PATH=/opt/mlcd/bin:$PATH PYTHONDONTWRITEBYTECODE=1 PYTHONUNBUFFERED=1
USER 10001:10001
WORKDIR /var/lib/mlcd

FROM api-packages AS starter
COPY deploy/locks/starter.txt ./
RUN python -m pip --python /opt/mlcd/bin/python install --require-hashes --only-binary :all: --no-deps -r starter.txt
COPY --from=project /opt/mlcd /opt/mlcd
# Made here, so that no image needs the packages that it is made with.
RUN /opt/mlcd/bin/mlcd export starter /srv/mlcd/model --name starter && chmod -R a+rX /srv/mlcd

FROM runtime AS mlcd
COPY --from=starter /srv/mlcd/model /srv/mlcd/model
# Reached from outside the container, the server asks for keys, or for MLCD_AUTH__MODE=open. A model of one's own is
# mounted over the starter.
ENV MLCD_HOST=0.0.0.0 MLCD_PORT=8000 MLCD_MODEL=/srv/mlcd/model
EXPOSE 8000
ENTRYPOINT ["mlcd"]
CMD ["--help"]

# `mlcd worker`, and the commands over artifacts: embed, cluster, label, index, verify.
FROM mlcd AS worker
COPY --from=api-packages /opt/mlcd /opt/mlcd
COPY --from=project /opt/mlcd /opt/mlcd

# The server is the worker's image with a health check: compose waits in vain for one that is taken back.
FROM worker AS api
HEALTHCHECK --interval=10s --timeout=5s --start-period=120s --retries=3 CMD ["python", "-IS", "/opt/ready.py", "8000", "/health/ready"]
CMD ["serve"]

FROM ${PYTHON_IMAGE} AS triton-packages
ENV PIP_NO_CACHE_DIR=1 PIP_DISABLE_PIP_VERSION_CHECK=1
WORKDIR /locks
RUN python -m venv --without-pip /opt/triton
COPY deploy/locks/triton.txt ./
RUN python -m pip --python /opt/triton/bin/python install --require-hashes --only-binary :all: --no-deps -r triton.txt

# The server that nvidia-pytriton bundles: a release without the security fixes of 2025, for a network of its own only.
FROM runtime AS triton-cpu
USER root
# The server's python backend loads the interpreter as a library, which Debian's own python3 comes without.
RUN test -f "$(python -c 'import sysconfig as s; print(s.get_config_var("LIBDIR"))')/libpython3.11.so.1.0" \
    || { apt-get update && apt-get install --yes --no-install-recommends libpython3.11 && rm -rf /var/lib/apt/lists/*; }
COPY --from=triton-packages /opt/triton /opt/triton
COPY deploy/triton/serve.py /opt/triton/
ENV PATH=/opt/triton/bin:$PATH
# Else at the first start, when nothing can be written any more.
RUN cd /opt/triton && python -c "import serve, sysconfig; serve.backends(serve.Path(sysconfig.get_path('platlib')) / 'pytriton/tritonserver')"
USER 10001:10001
HEALTHCHECK --interval=10s --timeout=5s --start-period=120s --retries=3 CMD ["python", "-IS", "/opt/ready.py", "8003", "/v2/health/ready"]
ENTRYPOINT ["python", "/opt/triton/serve.py", "--address", "0.0.0.0"]
CMD ["/srv/triton"]

FROM packages AS api-gpu-packages
COPY deploy/locks/api-gpu.txt ./
RUN python -m pip --python /opt/mlcd/bin/python install --require-hashes --only-binary :all: --no-deps -r api-gpu.txt

# Triton, the language of the kernels, compiles a part of them against Python's headers at their first use, and keeps it
# where code may be executed: compose mounts /tmp without that right.
FROM mlcd AS gpu
USER root
RUN headers=$(python -c 'import sysconfig as s; print(s.get_path("include"))'); \
    apt-get update && apt-get install --yes --no-install-recommends gcc libc6-dev \
        $(test -f "$headers/Python.h" || echo libpython3.11-dev) \
    && rm -rf /var/lib/apt/lists/*
ENV TRITON_CACHE_DIR=/var/lib/mlcd/kernels
USER 10001:10001

# For machines with an NVIDIA GPU; without one they work on the CPU.
FROM gpu AS worker-gpu
COPY --from=api-gpu-packages /opt/mlcd /opt/mlcd
COPY --from=project /opt/mlcd /opt/mlcd

FROM worker-gpu AS api-gpu
HEALTHCHECK --interval=10s --timeout=5s --start-period=120s --retries=3 CMD ["python", "-IS", "/opt/ready.py", "8000", "/health/ready"]
CMD ["serve"]

FROM packages AS train-packages
COPY deploy/locks/train.txt ./
RUN python -m pip --python /opt/mlcd/bin/python install --require-hashes --only-binary :all: --no-deps -r train.txt

# Every command, `mlcd train` and `mlcd export` too, on machines with a GPU and without: torch as its registry has it, which
# on Linux brings CUDA.
FROM gpu AS train
COPY --from=train-packages /opt/mlcd /opt/mlcd
COPY --from=project /opt/mlcd /opt/mlcd
