"""Connected sockets between two agents, and what is said on them."""
