"""What every channel between processes and hosts is made of: secrets, handshakes, framing, stores and addresses."""
