"""The control channel: small messages, with optional bytes and file descriptors, between processes.

``connection``  one end of a connection: framing, raw bytes, descriptors
``handshake``   both sides prove that they know a token before anything else is said
``listener``    the accept loop, with limits that hold before the proof
``tls``         encryption, where the network is not trusted
"""
