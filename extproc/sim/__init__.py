"""Simulated engines and workloads that stand in for GPUs."""
