"""The tables of the paper, one module each: its cells, and what is made of their rows.

Of AutoHAAP (HPCA 2026) only the abstract is public: neither its clusters nor its baselines are. So the comparison is
reproduced, not the digits; what is published stands in `paper_values.yaml`, beside ours in every table.
"""
