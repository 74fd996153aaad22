"""Reactions and components written by hand, in place of a plan under a policy."""

from haap_rl.faults.model import Component
from haap_rl.faults.response import Response, Transitions

STOPPED = Response(0.0, reason="waits")
FREE = Transitions(0.0, 0.0, 0.0, 0.0, 0.0)


class Scripted:
    """`respond(down)`, each set asked for once."""

    def __init__(self, respond, transitions=FREE):
        self.respond, self.transitions, self.known = respond, transitions, {}

    def __call__(self, down):
        if down not in self.known:
            self.known[down] = self.respond(down)
        return self.known[down]


def device(index=0, mtbf_s=1e4, recovery_s=1e3, **kind):
    return Component("device", 0, index, 1, mtbf_s, recovery_s, **kind)
