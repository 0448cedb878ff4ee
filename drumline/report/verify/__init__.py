"""`drumline verify` checks run folders, without torch; `drumline prove-resume` kills runs and
compares them."""
