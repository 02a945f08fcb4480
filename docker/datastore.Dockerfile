# The datastore service alone: the base install, no torch, no SGLang.
FROM python:3.11-slim AS build
WORKDIR /src
COPY pyproject.toml README.md LICENSE common_ops.py ./
COPY requirements/lock.txt requirements/
COPY protos protos
COPY proto_gen proto_gen
COPY datastore_service datastore_service
COPY sglang_patches sglang_patches
RUN python -m venv /opt/specstore \
 && /opt/specstore/bin/pip install --no-cache-dir --constraint requirements/lock.txt .

FROM python:3.11-slim
# The same user as in the engine's image, because the two share a socket.
RUN useradd --uid 10001 --create-home specstore \
 && install --directory --owner specstore --mode 0700 /cache /data /run/specstore
COPY --from=build /opt/specstore /opt/specstore
# Where the service listens and where every other command looks for it.
ENV PATH=/opt/specstore/bin:$PATH PYTHONUNBUFFERED=1 SPECSTORE_ENDPOINT=unix:/run/specstore/datastore.sock
USER specstore
# Compiles the kernels now and not at each container's first start. Another kind of processor compiles them again there.
RUN python -c "from datastore_service.engine.engine import Engine; Engine(1)"
ENTRYPOINT ["specstore"]
CMD ["serve", "--listen", "unix:/run/specstore/datastore.sock", "--data", "/data"]
