"""What one machine is, and what is wrong with it. Nothing here loads torch."""
