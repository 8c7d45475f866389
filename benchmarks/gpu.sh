#!/usr/bin/env bash
# Everything about a GPU that cannot be seen on a CPU, in at most four minutes on one device. Prints JSON at the end.
#   benchmarks/gpu.sh [OUTPUT.json]
set -eu
cd "$(dirname "$0")/.."
python=${PYTHON:-python3}
"$python" -c 'import torch, sys; sys.exit(0 if torch.cuda.is_available() else "benchmarks/gpu.sh: torch sees no CUDA device")'
"$python" -m pip install --quiet safetensors xxhash psutil pyyaml typer rich numpy pytest pytest-timeout >/dev/null 2>&1 || true
export PYTHONPATH="$PWD${PYTHONPATH:+:$PYTHONPATH}"
timeout 150 "$python" -m benchmarks.gpu "${1:-benchmarks/results/gpu.json}"
timeout 90 "$python" -m pytest -q -p no:cacheprovider tests/gpu
