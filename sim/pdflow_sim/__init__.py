"""The simulated world: simpy carries the endpoints of pdflow.protocol, the engines, the links and the router."""
