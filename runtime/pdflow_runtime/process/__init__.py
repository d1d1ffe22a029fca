"""The processes of a cluster: how each is started, found and stopped."""
