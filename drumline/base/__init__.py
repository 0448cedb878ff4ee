"""What every part uses: errors, text, processes, untrusted files, and which rank this is. Only
`startup.py` imports torch, for those who call it."""
