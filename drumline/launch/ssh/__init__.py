"""A job on several hosts from one command: the controller here, a supervisor on each host."""
