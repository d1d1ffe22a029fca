"""The live world, to come: a trio driver for the endpoints of pdflow.protocol, transports that move real bytes, engines
that compute real tokens, the router's HTTP side, and `pdflow serve`.

Nothing here decides a rule of the protocol. It will deliver events to the endpoints, execute their effects, and be the
only place that reads a clock.
"""
