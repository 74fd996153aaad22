"""Gymnasium environments over the plan space. Importing this registers them; the classes load when they are made.

`gymnasium.make("haap_envs:haap_rl/Partition-v0")` needs no import, `gymnasium.make("haap_rl/Partition-v0")` this one.
"""

from gymnasium.envs.registration import register

register(id="haap_rl/Partition-v0", entry_point="haap_envs.partition:PartitionEnv")
register(id="haap_rl/Construct-v0", entry_point="haap_envs.construct:ConstructEnv")
