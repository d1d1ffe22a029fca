"""The engines that compute tokens: a transformer in torch with a paged KV cache, and a synthetic one that computes
nothing but takes as long."""

import os

# With AMX, oneDNN cuts a bfloat16 product's sums by how many rows there are: a prompt that is computed in other chunks,
# or beside another one, gets other last bits, and P with D other tokens than one engine alone. Read at torch's first
# product. Whoever sets it otherwise has what is set.
os.environ.setdefault("ONEDNN_MAX_CPU_ISA", "AVX512_CORE_BF16")
