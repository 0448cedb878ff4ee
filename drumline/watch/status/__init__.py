"""How a run stands, for whoever follows it from outside: `drumline watch`."""
