"""What MeCeFO costs and what it keeps: throughput of plans under failures, convergence of a small model."""
