"""To read and run: each is a script, and an experiment of lightning_dp unless plain PyTorch."""
