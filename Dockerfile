# Two images. The variable SERVICE says what a container runs:
#
#   docker build --target service -t contrail .           SERVICE is serve, storage, api or gateway
#   docker build --target spark -t contrail-spark .       SERVICE is spark-master, spark-worker, job or flights
#
# The first has neither Spark nor a JVM.

FROM python:3.13-slim-bookworm AS base
# A mirror of the package index, when the machine uses one.
ARG PIP_INDEX_URL
RUN apt-get update \
    && apt-get install --yes --no-install-recommends make \
    && rm -rf /var/lib/apt/lists/*
WORKDIR /opt/contrail
COPY Makefile requirements.lock ./
COPY libs libs
COPY services services
COPY deploy/container deploy/container

FROM base AS install-service
ARG MEMBERS="libs/common libs/link libs/edge libs/client services/storage services/replicator services/api services/consumer-gateway services/serve"
# Remove what the image does not need: pip, tests, and the parts of Arrow for RPC and S3.
RUN --mount=type=cache,target=/var/cache/pip \
    python deploy/container/lock.py requirements.lock $MEMBERS > service.lock \
    && PIP_CACHE_DIR=/var/cache/pip make install LOCK=service.lock MEMBERS="$MEMBERS" \
    && rm -rf .venv/pycache && cd .venv/lib/python3*/site-packages \
    && find . -type d -name tests -prune -exec rm -rf {} + \
    && rm -rf pip pip-*.dist-info setuptools setuptools-*.dist-info pyarrow/include pyarrow/src \
        pyarrow/libarrow_flight* pyarrow/_flight* pyarrow/libarrow_s3* pyarrow/_s3fs* \
        pyarrow/libarrow_python*.so pyarrow/libarrow_python*.so.*.*
# Compile now, because a read-only container cannot store bytecode.
RUN .venv/bin/python -m compileall -q -j 0 --invalidation-mode unchecked-hash .venv/lib libs services \
    && .venv/bin/python -c 'import contrail_serve.main, contrail_storage.node, pyarrow.ipc' \
    && chmod -R a+rX .

FROM base AS install-spark
COPY spark spark
COPY examples examples
RUN --mount=type=cache,target=/var/cache/pip \
    PIP_CACHE_DIR=/var/cache/pip make install
# Compile now, and write the script that starts a reduced Java: a read-only container can do neither.
RUN .venv/bin/python -m compileall -q -j 0 --invalidation-mode unchecked-hash .venv/lib libs services spark examples \
    && XDG_CACHE_HOME=/opt/contrail/.cache .venv/bin/python -c \
        'from contrail_spark.session import find_java; print(find_java())' \
    && chmod -R a+rX .

FROM python:3.13-slim-bookworm AS runtime
RUN groupadd --gid 10001 contrail \
    && useradd --uid 10001 --gid 10001 --home-dir /data --no-create-home contrail \
    && install -d -o 10001 -g 10001 -m 0750 /data
ENV PATH=/opt/contrail/.venv/bin:$PATH \
    PYTHONDONTWRITEBYTECODE=1 \
    PYTHONUNBUFFERED=1 \
    CONTRAIL_HOST=0.0.0.0 \
    CONTRAIL_DATA_DIR=/data
USER 10001:10001
WORKDIR /data
VOLUME /data
STOPSIGNAL SIGTERM
ENTRYPOINT ["/bin/sh", "/opt/contrail/deploy/container/start"]

FROM runtime AS spark
COPY --from=install-spark /opt/contrail /opt/contrail
ENV SERVICE=spark-master \
    XDG_CACHE_HOME=/opt/contrail/.cache \
    MPLCONFIGDIR=/tmp/matplotlib
# The master and its page; the worker's page.
EXPOSE 7077 8080 8081
# On a busy machine a JVM takes minutes to start.
HEALTHCHECK --interval=10s --timeout=5s --start-period=180s --retries=3 \
    CMD ["python", "/opt/contrail/deploy/container/healthy.py"]

# A build without --target makes the last stage.
FROM runtime AS service
COPY --from=install-service /opt/contrail /opt/contrail
ENV SERVICE=serve
# api and serve; gateway; probes of storage; service link; other nodes of a cluster.
EXPOSE 7420 7421 7422 7430 7431
HEALTHCHECK --interval=10s --timeout=5s --start-period=60s --retries=3 \
    CMD ["python", "/opt/contrail/deploy/container/healthy.py"]
