"""Reads run folders only, and writes them as one HTML file: `drumline report`. No torch."""
