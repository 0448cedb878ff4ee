"""`drumline prove-resume`: kills runs, and compares them with one that was not killed."""
