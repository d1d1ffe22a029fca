"""Worlds with the router's endpoint in them."""
