"""What the names of the given files mean, as far as it can be known without running them."""
