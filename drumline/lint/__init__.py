"""`drumline lint`: reads training code, and tells which mistakes of distributed training are in it.

It reads source only: nothing that it reads is imported, nor is torch. `reading` finds files and parses them, `program`
knows what their names mean, `rules` look for one mistake each, `telling` says what they found.
"""
