"""What a run leaves on disk: its folder, events, sample ledger, manifests and profiles. Never
imports torch."""
