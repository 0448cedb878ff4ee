"""Before a run: is this machine, and every pair of hosts, fit for the job?"""
