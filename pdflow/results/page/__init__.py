"""A run as one page of HTML: figures, curves and the scenario, in one file that asks nothing of any network."""
