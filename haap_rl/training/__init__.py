"""How a policy is trained on many problems: the teacher's plans, cloning, then PPO."""
