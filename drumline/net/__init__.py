"""Channels between processes and hosts: handshake, frames, key exchange, and which addresses and
ports can be reached."""
