"""WHERE TO LOOK: the one declared space of plans, how to draw from it, move in it, and bound it from below."""
