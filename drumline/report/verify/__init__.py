"""`drumline verify`: checks run folders, without torch."""
