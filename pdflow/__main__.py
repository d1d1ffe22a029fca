"""`python -m pdflow`."""

from pdflow.cli import main

main()
