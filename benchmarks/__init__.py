"""What Drumline costs and gains, measured; README.md says which command makes which table."""
