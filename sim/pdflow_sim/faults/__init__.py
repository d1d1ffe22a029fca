"""Fault injection: what a plan of faults does to nodes, links and clocks."""
