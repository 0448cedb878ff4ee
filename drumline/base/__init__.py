"""What every part uses: errors, text, processes, untrusted files, and which rank this is. Never
imports torch."""
