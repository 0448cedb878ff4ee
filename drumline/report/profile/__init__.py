"""What a profile says: its text and its advice, from the document in the run folder."""
