"""What a run reports: meters on the device, events, and the sinks that write and show them.

Nothing is imported here, so that what only reads events (the report) does without torch.
"""
