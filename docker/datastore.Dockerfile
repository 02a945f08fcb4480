# The datastore service alone: the base install, no torch, no SGLang. LEVEL: of the processors that it runs on.
FROM python:3.11-slim AS build
WORKDIR /src
COPY pyproject.toml README.md LICENSE ./
COPY requirements/lock.txt requirements/
COPY protos protos
COPY proto_gen proto_gen
COPY datastore_service datastore_service
COPY sglang_patches sglang_patches
RUN python -m venv /opt/specstore \
 && /opt/specstore/bin/pip install --no-cache-dir --constraint requirements/lock.txt '.[backup,share]'

FROM python:3.11-slim
ARG LEVEL=x86-64-v3
# The same user as in the engine's image, because the two share a socket.
RUN useradd --uid 10001 --create-home specstore \
 && install --directory --owner specstore --mode 0700 /cache /data /run/specstore
COPY --from=build /opt/specstore /opt/specstore
# Where the service listens and where every other command looks for it.
ENV PATH=/opt/specstore/bin:$PATH PYTHONUNBUFFERED=1 SPECSTORE_ENDPOINT=unix:/run/specstore/datastore.sock
USER specstore
# The kernels are compiled now, for all processors of the level, and no container compiles them again. A kernel's file is named
# after the sources' digest, so it does not matter that an image that is copied has the sources' times rounded.
ENV NUMBA_CPU_NAME=$LEVEL NUMBA_CPU_FEATURES="" NUMBA_CACHE_LOCATOR_CLASSES=datastore_service.engine.image.ImageKernels \
    NUMBA_CACHE_DIR=/home/specstore/.cache/numba
RUN python -m datastore_service.engine.precompile
ENTRYPOINT ["specstore"]
CMD ["serve", "--listen", "unix:/run/specstore/datastore.sock", "--data", "/data"]
