"""Checks every pair of hosts: names, ports, packet sizes and speed. Nothing here loads torch."""
