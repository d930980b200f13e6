# An agent with vLLM as its child:
#   docker build -f infra/docker/agent-vllm.Dockerfile -t stream-gw/agent-vllm:0.1.0 .
# Our packages lie in an environment of their own, so that they and vLLM's do not meet; the agent finds vLLM's command on
# the PATH. The version of vLLM is the one that the tests run with.
ARG VLLM=vllm/vllm-openai:v0.32.0

FROM ${VLLM}
USER 0:0
WORKDIR /src
COPY LICENSE README.md pyproject.toml requirements.lock ./
COPY stream_fabric stream_fabric
COPY stream_gw stream_gw
COPY clients clients
COPY inference inference
COPY telemetry telemetry
RUN python3 -m venv --without-pip /opt/stream-gw \
    && python3 -m pip --python /opt/stream-gw/bin/python install --no-cache-dir --disable-pip-version-check \
        -c requirements.lock ".[vllm,kafka,otel,privacy]" \
    && ln -s /opt/stream-gw/bin/stream-gw /usr/local/bin/stream-gw \
    && rm -rf /src \
    && useradd --uid 10001 --user-group --create-home --shell /usr/sbin/nologin stream-gw \
    && install -d -o stream-gw -g stream-gw /models /var/spool/stream-gw
# The base holds vLLM's packages without bytecode, and the root file system is read-only: each of vLLM's processes would
# compile what it imports at every start. A few files are for other versions of Python
RUN python3 -m compileall -q -j 0 \
        "$(python3 -c 'import importlib.util as i, os; print(os.path.dirname(i.find_spec("vllm").submodule_search_locations[0]))')" \
    || true
ENV PYTHONUNBUFFERED=1 PYTHONDONTWRITEBYTECODE=1 HF_HOME=/models VLLM_NO_USAGE_STATS=1
WORKDIR /home/stream-gw
USER 10001:10001
EXPOSE 9465
ENTRYPOINT ["stream-gw"]
