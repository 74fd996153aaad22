"""Plans for training large language models on clusters of unequal devices.

Start at `haap_rl.train`, then `haap_rl.problem.plan`, `haap_rl.cost.estimator`, `haap_rl.search.base`, one searcher.
"""
