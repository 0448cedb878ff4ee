"""From paths to what rules read: files are found, Python and notebooks parsed, scripts split into commands."""
