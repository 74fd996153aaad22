"""Readers of other tools' files: each turns one file into the plain mapping that a preset of `conf/` is.

No reader guesses: what it cannot know comes from the device registry or is asked for, and what it does not
understand is refused with file, line or key, value, rule and a way out. `measured.py` is the exception: it reads runs
that others published into problems and plans, and lists what it had to assume.
"""
