"""What one engine does with the requests of its role, between its endpoints and whoever computes, moves and answers."""
