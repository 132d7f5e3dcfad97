"""Training of agents in the environments.

Programs at the end of the road: they may use everything (`env`, `counterfactuals`, `interp`), and nothing imports them.
"""
