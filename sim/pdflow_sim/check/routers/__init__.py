"""The router alone, with every rule and policy: all orders of its events (`pdflow check routers`)."""
