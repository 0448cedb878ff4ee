"""Jobs that a cluster starts: Slurm and Kubernetes, in their own words."""
