# One file for every service: docker build --build-arg SERVICE=api -t contrail-api .
# SERVICE is serve, storage, api, gateway, spark-master, spark-worker or flights (the demonstration).
# It is named last, so that the images of all services share every layer.

FROM python:3.13-slim-bookworm AS install
# A mirror of the package index, when the machine uses one.
ARG PIP_INDEX_URL
RUN apt-get update \
    && apt-get install --yes --no-install-recommends make \
    && rm -rf /var/lib/apt/lists/*
WORKDIR /opt/contrail
COPY Makefile requirements.lock ./
COPY libs libs
COPY services services
COPY spark spark
RUN --mount=type=cache,target=/var/cache/pip \
    PIP_CACHE_DIR=/var/cache/pip make install
# A read-only container cannot keep bytecode, nor the script that starts a trimmed Java.
RUN .venv/bin/python -m compileall -q -j 0 --invalidation-mode unchecked-hash \
        .venv/lib libs services spark \
    && XDG_CACHE_HOME=/opt/contrail/.cache .venv/bin/python -c \
        'from contrail_spark.session import find_java; print(find_java())'
COPY deploy/container deploy/container
# Whatever umask the tree was checked out with, the service's user reads it.
RUN chmod -R a+rX .

FROM python:3.13-slim-bookworm
RUN groupadd --gid 10001 contrail \
    && useradd --uid 10001 --gid 10001 --home-dir /data --no-create-home contrail \
    && install -d -o 10001 -g 10001 -m 0750 /data
COPY --from=install /opt/contrail /opt/contrail
ENV PATH=/opt/contrail/.venv/bin:$PATH \
    XDG_CACHE_HOME=/opt/contrail/.cache \
    MPLCONFIGDIR=/tmp/matplotlib \
    PYTHONDONTWRITEBYTECODE=1 \
    PYTHONUNBUFFERED=1 \
    CONTRAIL_HOST=0.0.0.0 \
    CONTRAIL_DATA_DIR=/data
ARG SERVICE=serve
ENV SERVICE=$SERVICE
USER 10001:10001
WORKDIR /data
VOLUME /data
# api and serve; gateway; probes of storage; service link; Spark master and its page; page of the worker
EXPOSE 7420 7421 7422 7430 7077 8080 8081
STOPSIGNAL SIGTERM
HEALTHCHECK --interval=10s --timeout=5s --start-period=60s --retries=3 \
    CMD ["python", "/opt/contrail/deploy/container/healthy.py"]
ENTRYPOINT ["/bin/sh", "/opt/contrail/deploy/container/start"]
