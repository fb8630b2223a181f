"""The Hydra configuration, installed as ``lightning_dp.conf`` (``pkg://lightning_dp.conf``)."""
