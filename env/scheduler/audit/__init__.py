"""What the environment rewards: how much there is to gain over greedy, and what fusion, tiles and retention are worth.

python -m env.scheduler.audit --out reports/environment
"""
