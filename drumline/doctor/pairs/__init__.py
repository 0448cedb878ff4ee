"""Every pair of hosts: what gets through between them, and how fast. Nothing here loads torch."""
