"""Clients: sessions that send one turn after the other, and clients that give up."""
