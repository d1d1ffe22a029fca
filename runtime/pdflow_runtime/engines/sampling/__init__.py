"""How the next token of an answer is chosen: what a request forbids or favours (`constraints.py`), the draw
(`draws.py`), and the log probabilities that are returned (`logprobs.py`)."""
