"""How ranks come together before there is a group: who is here, what each is about to run, who reaches whom."""
