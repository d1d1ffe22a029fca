"""Nothing but the optional compilation; all else is in pyproject.toml.

`PDFLOW_COMPILE=1 pip install .` has mypyc turn the rooms that a run spends its time in into C, from the same source and
types, which simulates nearly twice as fast. It needs a C compiler, and three minutes; two with
PDFLOW_COMPILE_LEVEL=0, for whoever wants to see that it works and not that it is fast.
"""

import os
import sys
import tomllib
from glob import glob
from pathlib import Path

from setuptools import setup

COMPILED = [
    "pdflow/cost/progression.py",
    "pdflow/engine/*.py",
    "pdflow/layout/*.py",
    "pdflow/memory/*.py",
    "pdflow/methods/kv_store_*.py",
    "pdflow/methods/lanes.py",
    "pdflow/methods/shipment.py",
    "pdflow/methods/staging.py",
    "pdflow/methods/store_memory.py",
    "pdflow/network/*.py",
    "pdflow/protocol/consumer*.py",
    "pdflow/protocol/deadlines.py",
    "pdflow/protocol/ghosts.py",
    "pdflow/protocol/invariants.py",
    "pdflow/protocol/lease.py",
    "pdflow/protocol/matching.py",
    "pdflow/protocol/oracle_*.py",
    "pdflow/protocol/peers.py",
    "pdflow/protocol/producer*.py",
    "pdflow/protocol/tombstones.py",
    "pdflow/results/itls.py",
    "pdflow/results/records.py",
    "pdflow/results/steps.py",
    "pdflow/routing/*.py",
    "pdflow/serving/*.py",
    "sim/*_node.py",
    "sim/clients.py",
    "sim/clock.py",
    "sim/fabric.py",
    "sim/faulty_fabric.py",
    "sim/first_tokens.py",
    "sim/flight.py",
    "sim/grouped_shipping.py",
    "sim/node.py",
    "sim/node_registry.py",
    "sim/paths.py",
    "sim/prompt_content.py",
    "sim/recording.py",
    "sim/router_link.py",
    "sim/run_metrics.py",
    "sim/shipping.py",
    "sim/skew.py",
    "sim/stores.py",
    "sim/writer.py",
]
INTERPRETED = {
    # attrs and msgspec make these classes at run time.
    "pdflow/engine/log.py",
    "pdflow/engine/sequence.py",
    "pdflow/engine/walk.py",
    "pdflow/serving/effects.py",
    "pdflow/serving/events.py",
    # A compiled class cannot extend that one.
    "pdflow/engine/named.py",
}


def modules() -> list[str]:
    """What is compiled: files, relative to this one."""
    found = {path for pattern in COMPILED for path in glob(pattern)}
    return sorted(path for path in found - INTERPRETED if not path.endswith("__init__.py"))


if not os.environ.get("PDFLOW_COMPILE"):
    setup()
elif "editable_wheel" in sys.argv:
    # The compiled modules would lie beside the source and hide every later change to it.
    sys.exit("PDFLOW_COMPILE is for `pip install .`, not for an editable installation")
elif "bdist_wheel" in sys.argv:
    from mypyc.build import mypycify

    extensions = mypycify(modules(), opt_level=os.environ.get("PDFLOW_COMPILE_LEVEL", "3"), debug_level="0")
    for extension in extensions:
        # Warnings of generated C say nothing, and to look for them in its one file of 69 MB takes gcc (-Wunused,
        # -Wmisleading-indentation) four times as long as to compile it without optimization.
        extension.extra_compile_args.append("-Wno-all")
    setup(ext_modules=extensions)
else:
    # mypyc is part of mypy, and reads the types of whatever is imported.
    project = tomllib.loads(Path("pyproject.toml").read_text("utf-8"))["project"]
    notebook = project["optional-dependencies"]["notebook"]
    setup(setup_requires=["mypy[mypyc]>=1.18", "pandas-stubs>=2.2", *project["dependencies"], *notebook])
