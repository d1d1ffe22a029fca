"""Exhaustive searches and random walks."""
