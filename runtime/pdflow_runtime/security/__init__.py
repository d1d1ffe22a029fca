"""Who may talk to whom: secrets, signatures, TLS, connections that are not authenticated yet."""
