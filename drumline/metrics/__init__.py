"""What a run reports: meters on the device, events, and the sinks that write and show them.

Nothing is imported here, so that code that only reads events does not load torch.
"""
