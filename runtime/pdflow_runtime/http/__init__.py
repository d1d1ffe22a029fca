"""HTTP/1.1 on raw trio sockets: a server, a client that keeps connections, the relay between them, OpenAI's shapes.

httptools parses (llhttp, strict); sockets are waited for with trio and read and written without waiting. That is what
keeps a streamed chunk at some tens of microseconds (measured).
"""
