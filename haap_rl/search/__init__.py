"""WHO LOOKS: one file, one searcher, all through the contract in `base.py`."""
