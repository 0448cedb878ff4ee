"""Before a run: checks whether this machine, or every pair of hosts, is ready for the job."""
