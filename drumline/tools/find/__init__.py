"""`drumline find-lr` and `drumline find-batch`: settings found by taking steps."""
