"""HOW LONG, HOW MUCH: pure functions of one key. Nothing here knows about search."""
