# jaxsok with the GPU back end, and what its demo and server need.
#
#   docker build -t jaxsok .
#   docker run --rm --gpus all jaxsok                        trains the demo model
#   docker run --rm --gpus all -p 8500:8500 -v $PWD:/models jaxsok serve /models/ps.json --host 0.0.0.0
#
# The libraries are compiled for the architectures of JAXSOK_CUDA_ARCHITECTURES (CMake's list; here: H100 and H200).
# JAX brings CUDA's own libraries, so the image that runs has no toolkit; the host needs a driver for CUDA 13.

FROM nvidia/cuda:13.0.1-devel-ubuntu24.04 AS build
ARG JAXSOK_CUDA_ARCHITECTURES=90
RUN apt-get update && apt-get install -y --no-install-recommends g++ python3 python3-venv && rm -rf /var/lib/apt/lists/*
WORKDIR /src
COPY . .
RUN python3 -m venv /venv && JAXSOK_CUDA=ON /venv/bin/pip wheel --verbose --no-deps --wheel-dir /wheels .

FROM python:3.12-slim
COPY --from=build /wheels /wheels
RUN pip install --no-cache-dir "$(echo /wheels/jaxsok-*.whl)[cuda13,databases,demo,serving]" && rm -r /wheels
RUN useradd --create-home jaxsok
USER jaxsok
WORKDIR /home/jaxsok
ENTRYPOINT ["python", "-m", "jaxsok"]
CMD ["demo", "--no-progress"]
