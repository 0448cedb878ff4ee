"""3. The process group: how ranks meet, talk, agree, share a seed and a model, and say who failed first."""
