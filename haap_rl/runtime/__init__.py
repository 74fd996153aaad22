"""Plans that run: real processes on torch.distributed do what a plan says, so that a prediction meets a measurement.

It sits on `problem` and `cost`; only its command, experiments and tests import it. `routes` and `schedule` are pure.
"""
