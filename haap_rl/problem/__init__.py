"""WHAT: the cluster, the model, the problem and the plan. Frozen data; no time, no randomness."""
