"""`pdflow explain`: the simulations that explain a request of a finished run."""
