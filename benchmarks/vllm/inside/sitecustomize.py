"""Runs at the start of every Python process of an instance: `instances` puts this folder on their PYTHONPATH.

vLLM's processes wait for each other by calling sched_yield in a loop. On Linux 6.18 with fewer cores than such loops,
every other thread of that core then stands still for seconds to minutes, kernel threads included ("workqueue lockup"
in the kernel's log): a decode worker got no CPU time in 60 s. A sleep of 0 s releases the GIL and waits as well.

With BENCH_FAULTS in the environment, NIXL fails as its folder says (`nixl_faults.py`).
"""

import os
import time


def _yield() -> None:
    time.sleep(0)


os.sched_yield = _yield

if os.environ.get("BENCH_FAULTS"):
    import nixl_faults

    nixl_faults.install(os.environ["BENCH_FAULTS"])
