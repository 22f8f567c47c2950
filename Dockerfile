# An image with the project and its libraries: for CPUs by default, for accelerators by a build argument.
#   docker build -t zeroplay .
#   docker build -t zeroplay --build-arg JAX='jax[cuda12]' .      GPUs;  JAX='jax[tpu]'  TPU VMs
#   docker run --rm -v "$PWD/runs:/zeroplay/runs" zeroplay \
#     --config=configs/quickstart.py --workdir=runs/quickstart
FROM python:3.12-slim
ARG JAX=
WORKDIR /zeroplay
COPY requirements.txt .
# The version of JAX stays that of requirements.txt; the argument adds the libraries of an accelerator.
RUN pip install --no-cache-dir -r requirements.txt && \
    if [ -n "$JAX" ]; then \
      version=$(python -c 'import importlib.metadata as m; print(m.version("jax"))') && \
      pip install --no-cache-dir "$JAX==$version"; \
    fi
COPY . .
ENTRYPOINT ["python", "-m", "zeroplay_jax.main"]
