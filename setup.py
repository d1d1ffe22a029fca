"""Nothing but the optional compilation; all else is in pyproject.toml.

`PDFLOW_COMPILE=1 pip install .` has mypyc turn the files that a run spends its time in into C, from the same source and
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
    "pdflow/methods/store/*.py",
    "pdflow/methods/lanes.py",
    "pdflow/methods/shipment.py",
    "pdflow/methods/staging.py",
    "pdflow/network/*.py",
    "pdflow/protocol/consumer/*.py",
    "pdflow/protocol/deadlines.py",
    "pdflow/protocol/invariants/*.py",
    "pdflow/protocol/peers.py",
    "pdflow/protocol/producer/*.py",
    "pdflow/results/figures/itls.py",
    "pdflow/results/records.py",
    "pdflow/results/steps.py",
    "pdflow/routing/*.py",
    "pdflow/serving/*.py",
    "sim/pdflow_sim/nodes/*_node.py",
    "sim/pdflow_sim/clients/clients.py",
    "sim/pdflow_sim/clock.py",
    "sim/pdflow_sim/network/fabric.py",
    "sim/pdflow_sim/faults/faulty_fabric.py",
    "sim/pdflow_sim/clients/first_tokens.py",
    "sim/pdflow_sim/explain/observed_steps.py",
    "sim/pdflow_sim/network/flight.py",
    "sim/pdflow_sim/network/grouped_shipping.py",
    "sim/pdflow_sim/nodes/node.py",
    "sim/pdflow_sim/nodes/registry.py",
    "sim/pdflow_sim/network/paths.py",
    "sim/pdflow_sim/clients/prompt_content.py",
    "sim/pdflow_sim/observe/recording.py",
    "sim/pdflow_sim/nodes/router_link.py",
    "sim/pdflow_sim/observe/run_metrics.py",
    "sim/pdflow_sim/network/shipping.py",
    "sim/pdflow_sim/network/shipped_pieces.py",
    "sim/pdflow_sim/network/piece_hops.py",
    "sim/pdflow_sim/faults/clock_skew.py",
    "sim/pdflow_sim/nodes/stores.py",
    "sim/pdflow_sim/nodes/writer.py",
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
    extras = project["optional-dependencies"]
    stubs = [need for need in extras["dev"] if need.startswith("types-") or "-stubs" in need]
    setup(setup_requires=["mypy[mypyc]>=1.18", *stubs, *project["dependencies"], *extras["notebook"]])
