"""Trackers: services and files that show the curves of many runs. Each gets a run's events through
`tracking`."""
