"""How others choose a plan: each strategy rebuilt from its paper, every plan of theirs scored by our estimator."""
