"""OpenAI's API, as vLLM extends it: what a client may ask of /v1/completions and /v1/chat/completions, and the answers.

    body -> fields.py (JSON) -> sampling.py (what both APIs share) -> completion.py, chat.py -> answers.py, events.py

Whatever the bytes of a body, reading it gives a request or an OpenAIError. What is known but not to be had here is
refused; what nobody knows is passed over, as vLLM does.
"""
