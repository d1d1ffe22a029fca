"""Writes the digests of stories anew, after a change of what endpoints keep. What happens in them must be the same."""

from __future__ import annotations

import sys

from pdflow_sim.check.counterexamples.counterexample import read, write
from pdflow_sim.check.counterexamples.replay import record
from pdflow_sim.check.moves.compose import relation


def main(files: list[str]) -> None:
    for file in files:
        old = read(file)
        if old.mutant is not None:
            sys.exit(f"{file}: needs the mutant {old.mutant}, which is not in place here")
        new = record(relation(old.scope), old.moves, information=old.information)
        if new.moves != old.moves or new.verdict != old.verdict:
            sys.exit(f"{file}: the same moves tell another story now; see `pdflow check --replay {file}`")
        write(file, new)


if __name__ == "__main__":
    main(sys.argv[1:])
