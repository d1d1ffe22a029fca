"""The live runtime: a trio driver for the endpoints of pdflow.protocol, transports that move real bytes, engines that
compute real tokens, HTTP, the router, and `pdflow serve`.

Nothing here decides a rule of the protocol: it delivers events to the endpoints and does what their effects say.
"""
