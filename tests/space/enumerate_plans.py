"""Brute force over a tiny declared space, independent of the tables: legality and memory come from the estimator."""

import itertools

from haap_rl.problem.errors import PlanError
from haap_rl.space.space import Genome


def compositions(total, parts):
    """All ways to write `total` as `parts` positive whole numbers."""
    for cuts in itertools.combinations(range(1, total), parts - 1):
        edges = (0, *cuts, total)
        yield tuple(b - a for a, b in itertools.pairwise(edges))


def every_plan(space):
    """(genome, estimate) of every legal plan of the space, fitting or not."""
    for m in space.num_microbatches:
        for p in range(1, space.max_stages + 1):
            for options in itertools.product(range(len(space.options)), repeat=p):
                if any(space.sizes(m, k) is None for k in options) or min(space.devices_left(options)) < 0:
                    continue
                for layers in compositions(space.num_layers, p):
                    genome = Genome(m, options, layers)
                    try:
                        yield genome, space.estimator(space.plan(genome))
                    except PlanError as error:  # the space may only write legal plans
                        raise AssertionError(str(error)) from error
