"""What was found, for people and for machines."""
