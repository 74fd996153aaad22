"""Training that goes on when devices fail: MeCeFO's degraded backward pass, in plain torch. Imports nothing of ours."""
