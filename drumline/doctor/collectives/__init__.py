"""Real ranks that do what training does, with values that are known. Only here the doctor loads torch."""
