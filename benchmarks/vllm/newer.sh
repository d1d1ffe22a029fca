#!/bin/sh
# Makes an environment with another vLLM in front of the one that environment.sh has made, for the tests that need no
# kernels: the hooks that the connector uses, and vLLM's Scheduler under random schedules.
#
#     python=$(benchmarks/vllm/newer.sh 0.33.0 BASE FOLDER | tail -1)
#     "$python" -m pytest -m "vllm and not nightly" tests/vllm
#
# BASE is the folder of the other environment, whose torch and all else it goes on using. The wheel is CUDA's, without
# kernels for CPUs: nothing is served by it. 340 MB to fetch, 1 GB on disk.
set -eu
version=$1 base=$(cd "$2" && pwd) folder=$3
"$base/bin/python" -m venv --without-pip "$folder"
folder=$(cd "$folder" && pwd)
if [ ! -d "$folder/vllm-$version" ]; then
    "$base/bin/python" -m pip install -q --no-deps --no-compile --target "$folder/vllm-$version" "vllm==$version"
fi
packages() { "$1" -c 'import sysconfig; print(sysconfig.get_path("purelib"))'; }
theirs=$(packages "$base/bin/python")
# Other .pth files, such as that of an editable pdflow, count in the folder that Python itself looks through.
printf '%s\n' "$folder/vllm-$version" "import site; site.addsitedir('$theirs')" > "$(packages "$folder/bin/python")/base.pth"
"$folder/bin/python" -c "
import vllm
assert vllm.__version__ == '$version', vllm.__version__
" >&2
echo "$folder/bin/python"
