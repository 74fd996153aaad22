"""What a plan is worth when devices fail: failure models, policies, expected throughput, simulation."""
