"""Where foreign types and foreign failures stop. Adapters translate and nothing else."""
