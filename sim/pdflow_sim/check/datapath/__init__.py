"""A method's way of moving KV, explored: real memories, shipments and pages in every order that may be."""
