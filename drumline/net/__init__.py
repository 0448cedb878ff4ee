"""Channels between processes and hosts: secrets, handshakes, framing, stores and addresses."""
