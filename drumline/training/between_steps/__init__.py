"""What happens between steps: logging, comparing, evaluating, saving, and stopping on request."""
