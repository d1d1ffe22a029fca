"""`pdflow check`: explores the states that engines and a faulty network can reach, running the protocol's own code."""
