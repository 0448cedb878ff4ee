"""What differs between the machines of a job."""
