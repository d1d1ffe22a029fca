"""The encoding of the messages: vLLM 0.32's notifications (`vllm`), its side channel (`handshake`), our frames
(`strict`).

Decoders never raise: for any bytes they return a message or a `Malformed` that says why not, in time and memory
bounded by the constants of `limits`. Encoders raise LocalProtocolError for what no peer could read back. What a
message *means* is decided elsewhere; here only whether any correct sender could have written it.
"""
