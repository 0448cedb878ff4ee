"""`drumline profile`: from the traces of all ranks to one result."""
