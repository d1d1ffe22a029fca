"""Fault plans: which faults hit which engines and links, and when, as data and as drawn. Each driver applies them."""
