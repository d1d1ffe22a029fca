"""Connected sockets between two agents, and the messages on them."""
