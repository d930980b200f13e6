# Gateways, controllers, the consumer of events, and agents beside a server that somebody else started:
#   docker build -f infra/docker/platform.Dockerfile -t stream-gw/platform:0.1.0 .
# With --build-arg PYTHON=python@sha256:… the base is pinned to the byte.
ARG PYTHON=python:3.11.14-slim-bookworm

FROM ${PYTHON} AS build
RUN python -m venv /opt/stream-gw \
    && apt-get update && apt-get install -y --no-install-recommends gcc libc6-dev && rm -rf /var/lib/apt/lists/*
WORKDIR /src
COPY LICENSE README.md pyproject.toml requirements.lock setup.py ./
COPY stream_fabric stream_fabric
COPY stream_gw stream_gw
COPY clients clients
COPY inference inference
COPY telemetry telemetry
# The versions that the tests ran with; a ClickHouse server, so without its engine's 530 MB. Then the same again with the
# hot modules compiled, by a mypy that is not in the image
RUN export PIP_NO_CACHE_DIR=1 PIP_DISABLE_PIP_VERSION_CHECK=1 \
    && /opt/stream-gw/bin/python -m pip install -c requirements.lock ".[kafka,clickhouse,otel,keda,tenants,privacy]" \
    && /opt/stream-gw/bin/python -m pip install --target /opt/mypyc -c requirements.lock mypy setuptools \
    && PYTHONPATH=/opt/mypyc STREAM_GW_COMPILE=1 /opt/stream-gw/bin/python -m pip install \
        --no-build-isolation --no-deps --force-reinstall .

FROM ${PYTHON}
RUN useradd --uid 10001 --user-group --create-home --shell /usr/sbin/nologin stream-gw \
    && install -d -o stream-gw -g stream-gw /var/spool/stream-gw /var/lib/stream-gw
COPY --from=build /opt/stream-gw /opt/stream-gw
# The root file system is read-only: nothing is compiled at the start, so it was at the build
ENV PATH=/opt/stream-gw/bin:$PATH PYTHONUNBUFFERED=1 PYTHONDONTWRITEBYTECODE=1
WORKDIR /home/stream-gw
USER 10001:10001
EXPOSE 8080
ENTRYPOINT ["stream-gw"]
