"""Authentication and encryption between the processes of a cluster: secrets, signatures, TLS, pending connections."""
